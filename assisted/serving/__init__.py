"""Pairs behind OpenAI's protocol, for one user or a few."""

from .server import Refused, Server

__all__ = ["Refused", "Server"]

"""Is an engine lossless? Compares what a model or a server says, with its drafts, with a reference that has none."""

from .checks import Audit, Finding, Settings, audit
from .subjects import Model, NotOffered, Sampled, Server, Subject

__all__ = ["Audit", "Finding", "Model", "NotOffered", "Sampled", "Server", "Settings", "Subject", "audit"]

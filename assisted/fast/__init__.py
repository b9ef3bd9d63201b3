"""The modes of `fast=`: fused layers, packed products, captured and compiled forward passes. Each is checked before use."""

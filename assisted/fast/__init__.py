"""What `fast=` means: fused layers, packed products, captured and compiled passes. Each is tried before it is relied on."""

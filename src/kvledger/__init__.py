"""kvledger: a KV-cache server for vLLM engines whose books always balance."""

__version__ = "0.1.0"

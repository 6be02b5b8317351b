"""Real parts to try kvledger with: small random models, and vLLM engines in child processes.

The demo, the tests with a real engine and the bench are built from these. Importing this package
costs nothing: torch and vLLM are imported only where a model is written and in the child process.
"""

"""The sections of docs/performance.md, for update_performance.py."""

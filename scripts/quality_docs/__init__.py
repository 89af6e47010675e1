"""The sections of docs/quality.md, for update_quality.py."""

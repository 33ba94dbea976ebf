"""Bytes on disk: reading, comparing, durable writing, the journal and the lock. Knows no format."""

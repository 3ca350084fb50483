"""Integrations with other libraries; each library is imported only by its own module."""

"""ringcomm in other libraries; each is imported only by its own module."""

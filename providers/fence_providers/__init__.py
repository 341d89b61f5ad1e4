"""Control channels of the fence, one module a provider; found by entry point."""

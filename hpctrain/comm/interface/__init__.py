"""The Protocols of communicators, transports and files, and the checks that every backend applies to buffers."""

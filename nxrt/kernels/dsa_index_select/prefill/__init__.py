"""The prefill route, with headers of its own until they are one with the decode route's."""

"""Every message that crosses a process boundary.

JSON by msgspec. Decoders ignore unknown fields; evolve by adding fields with defaults. Instants are UTC Unix
milliseconds (``_at_ms``) of the process that wrote them; spans are milliseconds (``_ms``). OpenAI bodies and
chunks travel as ``msgspec.Raw`` and are not decoded on the way.
"""

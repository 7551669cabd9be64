"""Every message that crosses a process boundary.

JSON by msgspec. Decoders ignore unknown fields; evolve by adding fields with defaults. Spans are milliseconds
(``_ms``). Instants are UTC Unix milliseconds (``_at_ms``) by the clock of whoever wrote them, for records: nobody
compares one with a clock of its own, but for a model's owners, who all count from the bus's. OpenAI bodies and
chunks travel as ``msgspec.Raw`` and are not decoded on the way.
"""

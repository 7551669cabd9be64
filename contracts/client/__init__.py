"""What an internal service needs to ask over NATS; failures are contracts.errors.HeadraceError."""

from contracts.client.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionChunk,
    EmbeddingsAnswer,
    MessageAnswer,
    MessageEvent,
    ResponseAnswer,
    ResponseEvent,
)
from contracts.client.client import Client
from contracts.client.stream import ClientStream

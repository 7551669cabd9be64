-- One row for each attempt of a request: its terminal event (contracts.messages.AttemptEvent).
--
-- Rows may stand in it more than once until parts are merged: read it with FINAL (or through `usage`).
-- The key and the partition come from the request id alone, so copies of one event always meet in one partition;
-- `precedence` keeps the event that was stored first. `requested_at` is the time inside the request id: with it in
-- the key, a tenant's rows lie in order of time (a UUID's own order would scatter them).
CREATE TABLE IF NOT EXISTS attempts
(
    tenant             LowCardinality(String),
    requested_at       DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    request_id         UUID CODEC(ZSTD(1)),
    attempt            UInt16,
    key_id             LowCardinality(String),
    model              LowCardinality(String),
    version            LowCardinality(String),
    endpoint           LowCardinality(String),
    priority           LowCardinality(String),
    outcome            LowCardinality(String),
    reporter           LowCardinality(String),
    worker             String CODEC(ZSTD(1)),
    stream             Bool,
    finish_reason      LowCardinality(String),
    error_code         LowCardinality(String),
    error_message      String CODEC(ZSTD(1)),
    retryable          Bool,
    engine_death       Bool,
    billable           Bool,
    choices            UInt32 CODEC(T64, ZSTD(1)),
    prompt_tokens      UInt32 CODEC(T64, ZSTD(1)),
    cached_tokens      UInt32 CODEC(T64, ZSTD(1)),
    completion_tokens  UInt32 CODEC(T64, ZSTD(1)),
    reasoning_tokens   UInt32 CODEC(T64, ZSTD(1)),
    reserved_tokens    UInt64 CODEC(T64, ZSTD(1)),
    last_seq           Int64 CODEC(T64, ZSTD(1)),
    admitted_at        DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)) COMMENT 'The time that usage is charged to',
    dispatched_at      DateTime64(3, 'UTC') CODEC(ZSTD(1)) COMMENT '1970: never',
    started_at         DateTime64(3, 'UTC') CODEC(ZSTD(1)) COMMENT '1970: never, or not told',
    first_token_at     DateTime64(3, 'UTC') CODEC(ZSTD(1)) COMMENT '1970: never',
    ended_at           DateTime64(3, 'UTC') CODEC(ZSTD(1)) COMMENT '1970: unknown',
    pause_ms_max       UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Longest time between two tokens',
    arm                LowCardinality(String) COMMENT 'stable, canary or shadow: which version a roll-out gave it',
    stored_at          DateTime64(3, 'UTC') CODEC(ZSTD(1)) COMMENT 'Time of the bus, when it stored the event',
    stream_seq         UInt64 CODEC(Delta, ZSTD(1)),
    time_flag          LowCardinality(String) COMMENT 'late, ahead or behind: see the README; empty: times are plausible',
    client_request_id  String CODEC(ZSTD(1)),
    traceparent        String CODEC(ZSTD(1)),
    precedence         UInt64 CODEC(ZSTD(1)) COMMENT 'Greatest wins: earliest stored',
    requested_model    LowCardinality(String) COMMENT 'Model or alias that the caller named',
    choice_reason      String CODEC(ZSTD(1)) COMMENT 'Why this model answers; empty: it was named',
    INDEX own_id client_request_id TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX admitted_at_range admitted_at TYPE minmax GRANULARITY 1
)
ENGINE = ReplacingMergeTree(precedence)
PARTITION BY toYYYYMM(requested_at)
ORDER BY (tenant, requested_at, request_id, attempt)
SETTINGS non_replicated_deduplication_window = 1000, fsync_after_insert = 1, fsync_part_directory = 1;

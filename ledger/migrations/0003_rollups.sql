-- Sums of hours and days, so that questions over millions of attempts are answered at once (README, Rollups).
--
-- A period's rows are built whole, under a number that is theirs alone (`build`), and count from the moment that
-- rollup_builds names it. Each insert into `attempts` is followed by a mark on every hour that it touched; a period
-- whose marks are not those that its build covers is read from `attempts` instead. So duplicates and late events
-- never make a sum wrong, and nothing rests on clocks or on merges.
CREATE TABLE IF NOT EXISTS rollup_marks
(
    hour           DateTime('UTC'),
    marks          SimpleAggregateFunction(sum, UInt64),
    requested_from SimpleAggregateFunction(min, DateTime64(3, 'UTC')) COMMENT 'Where the hour lies in the key of attempts',
    requested_to   SimpleAggregateFunction(max, DateTime64(3, 'UTC'))
)
ENGINE = AggregatingMergeTree
ORDER BY hour
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS rollup_builds
(
    level    LowCardinality(String) COMMENT 'hour or day',
    start    DateTime('UTC'),
    build    UInt64,
    covers   UInt64 COMMENT 'Sum of the marks when the build began',
    built_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree(build)
ORDER BY (level, start)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS usage_hours
(
    start             DateTime('UTC') CODEC(Delta, ZSTD(1)),
    build             UInt64 CODEC(Delta, ZSTD(1)),
    tenant            LowCardinality(String),
    key_id            LowCardinality(String),
    model             LowCardinality(String),
    version           LowCardinality(String),
    endpoint          LowCardinality(String),
    priority          LowCardinality(String),
    outcome           LowCardinality(String),
    requests          UInt64 CODEC(T64, ZSTD(1)),
    attempts          UInt64 CODEC(T64, ZSTD(1)),
    prompt_tokens     UInt64 CODEC(T64, ZSTD(1)),
    cached_tokens     UInt64 CODEC(T64, ZSTD(1)),
    completion_tokens UInt64 CODEC(T64, ZSTD(1)),
    reasoning_tokens  UInt64 CODEC(T64, ZSTD(1)),
    unbilled_tokens   UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toYYYYMM(start)
ORDER BY (tenant, start, key_id, model)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS usage_days AS usage_hours
ENGINE = MergeTree
PARTITION BY toYear(start)
ORDER BY (tenant, start, key_id, model)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Sketches with a relative error of 2 %, the same in whatever order values and sketches are put together. Merging them
-- costs microseconds each, so rows without a tenant hold those of all tenants, and rows without a model those of all
-- models, versions and priorities. A sketch is read with its whole granule, hence the small ones.
CREATE TABLE IF NOT EXISTS latency_hours
(
    start             DateTime('UTC') CODEC(Delta, ZSTD(1)),
    build             UInt64 CODEC(Delta, ZSTD(1)),
    tenant            LowCardinality(String),
    model             LowCardinality(String),
    version           LowCardinality(String),
    priority          LowCardinality(String),
    queue_wait_count  UInt64 CODEC(T64, ZSTD(1)),
    queue_wait        AggregateFunction(quantilesDD(0.02, 0.5, 0.9, 0.95, 0.99), Float64) CODEC(ZSTD(1)),
    first_token_count UInt64 CODEC(T64, ZSTD(1)),
    first_token       AggregateFunction(quantilesDD(0.02, 0.5, 0.9, 0.95, 0.99), Float64) CODEC(ZSTD(1)),
    inter_token_count UInt64 CODEC(T64, ZSTD(1)),
    inter_token       AggregateFunction(quantilesDD(0.02, 0.5, 0.9, 0.95, 0.99), Float64) CODEC(ZSTD(1)),
    end_to_end_count  UInt64 CODEC(T64, ZSTD(1)),
    end_to_end        AggregateFunction(quantilesDD(0.02, 0.5, 0.9, 0.95, 0.99), Float64) CODEC(ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toYYYYMM(start)
ORDER BY (tenant, start, model)
SETTINGS index_granularity = 256, fsync_after_insert = 1, fsync_part_directory = 1;

CREATE TABLE IF NOT EXISTS latency_days AS latency_hours
ENGINE = MergeTree
PARTITION BY toYear(start)
ORDER BY (tenant, start, model)
SETTINGS index_granularity = 256, fsync_after_insert = 1, fsync_part_directory = 1;

-- What was there before: marked, and built like anything else. Repeated, it only marks once more.
INSERT INTO rollup_marks
SELECT toStartOfHour(admitted_at, 'UTC') AS hour, 1 AS marks, min(requested_at), max(requested_at)
FROM attempts GROUP BY hour
SETTINGS max_partitions_per_insert_block = 0;

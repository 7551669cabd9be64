-- The bucket PRICES as a table (the bucket is what counts; a ledger keeps this the same). Prices are millionths of
-- the currency's unit for a million tokens, which is picounits for one token: amounts are whole picounits.
CREATE TABLE IF NOT EXISTS prices
(
    model        LowCardinality(String),
    tier         LowCardinality(String) COMMENT 'The priority class that it is for',
    valid_from   Date COMMENT 'From this UTC day on, until a later price begins',
    currency     LowCardinality(String),
    input        UInt64,
    cached_input UInt64,
    output       UInt64,
    reasoning    UInt64,
    edition      UInt64 COMMENT 'Greatest wins',
    gone         UInt8
)
ENGINE = ReplacingMergeTree(edition, gone)
ORDER BY (model, tier, valid_from)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Attempts, each once, with what each is charged.
CREATE OR REPLACE VIEW billed AS
SELECT
    usage.*,
    p.currency AS currency,
    if(usage.billable,
        toInt128(prompt_tokens - cached_tokens) * p.input + toInt128(cached_tokens) * p.cached_input
        + toInt128(completion_tokens - reasoning_tokens) * p.output + toInt128(reasoning_tokens) * p.reasoning,
        0) AS amount_pico
FROM (SELECT *, toDate(admitted_at, 'UTC') AS day FROM attempts FINAL) AS usage
ASOF LEFT JOIN (SELECT * FROM prices FINAL) AS p
    ON usage.model = p.model AND usage.priority = p.tier AND usage.day >= p.valid_from;

-- The bucket PRICES as a table (the bucket is what counts; a ledger keeps this the same). Prices are millionths of
-- the currency's unit for a million tokens, which is picounits for one token: amounts are whole picounits.
CREATE TABLE IF NOT EXISTS prices
(
    model        LowCardinality(String),
    version      LowCardinality(String) COMMENT 'Empty: of all versions that have none of their own',
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
ORDER BY (model, version, tier, valid_from)
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1;

-- Attempts, each once, with what each is charged: at its version's price where that has one, else at its model's.
CREATE OR REPLACE VIEW billed AS
SELECT
    usage.*,
    if(v.currency != '', v.currency, m.currency) AS currency,
    if(usage.billable,
        toInt128(prompt_tokens - cached_tokens) * if(v.currency != '', v.input, m.input)
        + toInt128(cached_tokens) * if(v.currency != '', v.cached_input, m.cached_input)
        + toInt128(completion_tokens - reasoning_tokens) * if(v.currency != '', v.output, m.output)
        + toInt128(reasoning_tokens) * if(v.currency != '', v.reasoning, m.reasoning),
        0) AS amount_pico
FROM (SELECT *, toDate(admitted_at, 'UTC') AS day FROM attempts FINAL) AS usage
ASOF LEFT JOIN (SELECT * FROM prices FINAL WHERE version = '') AS m
    ON usage.model = m.model AND usage.priority = m.tier AND usage.day >= m.valid_from
ASOF LEFT JOIN (SELECT * FROM prices FINAL WHERE version != '') AS v
    ON usage.model = v.model AND usage.version = v.version AND usage.priority = v.tier AND usage.day >= v.valid_from;

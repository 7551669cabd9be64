-- Attempts, each once, for analysts: right before any merge and with duplicates inside one insert.
CREATE OR REPLACE VIEW usage AS SELECT * FROM attempts FINAL;

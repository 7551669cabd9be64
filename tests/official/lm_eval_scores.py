"""The evaluation harness's ``local-completions``: ``lm_eval_scores.py URL MODEL TOKENIZER``; needs no data set."""

import sys
from typing import Any

from lm_eval.api.instance import Instance  # type: ignore[import-not-found,unused-ignore]
from lm_eval.models.openai_completions import LocalCompletionsAPI  # type: ignore[import-not-found,unused-ignore]

URL, MODEL, TOKENIZER = sys.argv[1:]


def asked(kind: str, *each: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(each)]


def main() -> None:
    model = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions",
        model=MODEL,
        tokenizer=TOKENIZER,
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_retries=1,
    )
    made = model.generate_until(asked("generate_until", ("Once upon a time", {"until": ["."], "max_gen_toks": 8})))
    assert made[0], made
    question = "The capital of France is"
    scores = model.loglikelihood(asked("loglikelihood", (question, " Paris"), (question, " banana")))
    assert scores[0][0] > scores[1][0], scores
    rolling = model.loglikelihood_rolling(asked("loglikelihood_rolling", ("Paris is the capital of France.",)))
    assert rolling[0] < 0, rolling
    print("Paris before banana", scores, rolling)


main()

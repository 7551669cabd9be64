"""Structured output holds for any schema: constrained decoding makes it valid also when the model is tiny."""

import asyncio
import json
import random
from typing import Any

import jsonschema

from tests.support.stack import Stack

SCHEMAS = 100
SEED = 20261129
CONCURRENCY = 8
WORDS = ["city", "people", "näme", "size", "tags", "open now", "level", "note"]


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Bounded everywhere, so that every document ends within the output limit."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "anyOf", "format"]
    if depth < 2:
        kinds += ["object", "array"] * 2
    match draw.choice(kinds) if depth else "object":
        case "object":
            names = draw.sample(WORDS, draw.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(draw, depth + 1),
                "minItems": least,
                "maxItems": least + draw.randint(0, 2),
            }
        case "string":
            least = draw.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 12)}
        case "integer" | "number" as kind:
            least = draw.randint(-100, 100)
            return {"type": kind, "minimum": least, "maximum": least + draw.randint(1, 1000)}
        case "enum":
            return {"enum": draw.sample([*WORDS, 1, 2.5, True, None], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice([*WORDS, 7, False])}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
        case "format":
            return {"type": "string", "pattern": draw.choice(["^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(yes|no|maybe)$"])}
        case kind:
            return {"type": kind}


async def test_100_random_schemas_give_100_valid_documents(vllm_stack: Stack) -> None:
    draw = random.Random(SEED)
    schemas = [random_schema(draw) for _ in range(SCHEMAS)]
    free = asyncio.Semaphore(CONCURRENCY)
    wrong: list[str] = []

    async def ask(number: int, schema: dict[str, Any]) -> None:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": f"Describe place number {number} as JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": f"s{number}", "schema": schema}},
            "max_tokens": 600,
            "seed": number,
        }
        async with free:
            response = await client.post("/v1/chat/completions", json=body, timeout=300)
            while response.status_code == 529:  # A gateway beside an engine on two cores may be late.
                await asyncio.sleep(float(response.headers["retry-after"]))
                response = await client.post("/v1/chat/completions", json=body, timeout=300)
        text = response.text
        try:
            text = response.json()["choices"][0]["message"]["content"]
            jsonschema.validate(json.loads(text), schema)
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{number}: {schema}\n  {response.status_code} {text}\n  {error!r}"[:2000])

    async with vllm_stack.async_client() as client:
        await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))
    assert not wrong, f"seed {SEED}: {len(wrong)} of {SCHEMAS}\n" + "\n".join(wrong)

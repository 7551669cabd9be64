"""What ``headrace up`` says once it serves. Pure."""

import json

import msgspec

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is."""

    url: str
    admin_url: str
    metrics_url: str
    sql: str
    """Empty: there is no SQL endpoint."""
    key: str
    admin_key: str
    key_file: str
    directory: str
    models: list[str]

    def text(self, *, took_s: float, terminal: bool) -> str:
        """Keys, and links with keys, only for a terminal: what else there is is a file, or a collector of logs, which
        others read. In a link the key is the fragment, which browsers send to nobody.
        """
        own, admins = (f"#key={self.key}", f"#key={self.admin_key}") if terminal else ("", "")
        body = {"model": self.models[0], "stream": True, "temperature": 0, "messages": QUESTION}
        lines = [
            f"ready after {took_s:.1f} s",
            "",
            f"  chat       {self.url}/{own}",
            f"  usage      {self.url}/usage{own}",
            f"  console    {self.admin_url}/console{admins}",
            f"  API        {self.url}/v1 ({self.url}/docs; of the administration {self.admin_url}/docs)",
            f"  metrics    {self.metrics_url} (of all processes)",
            f"  keys       {self.key if terminal else 'the first'} (in {self.key_file}; the operator's in run.json)",
            f"  models     {', '.join(self.models)}",
            *([f"  SQL        {self.sql} (reads only; user and password in sql.json)"] if self.sql else []),
            f"  data       {self.directory} (logs in logs/, addresses in run.json)",
            "",
            f'  curl -N {self.url}/v1/chat/completions -H "Authorization: Bearer $(cat {self.key_file})" \\',
            f"    -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
            "",
            f"Headrace is ready at {self.url}",
        ]
        return "\n".join(lines)

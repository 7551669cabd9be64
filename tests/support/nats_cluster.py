"""Three nats-servers that are one cluster, on one machine."""

from pathlib import Path

from tests.support.nats_server import NatsServer, free_port


class NatsCluster:
    """Servers ``n0`` to ``n2``; ``servers`` by name."""

    def __init__(self, binary: str, directory: Path) -> None:
        names = ("n0", "n1", "n2")
        routes = {name: f"nats://127.0.0.1:{free_port()}" for name in names}
        self.servers: dict[str, NatsServer] = {}
        for name in names:
            own = directory / name
            own.mkdir()
            arguments = ["-n", name, "--cluster_name", "test", "--cluster", routes[name]]
            arguments += ["--routes", ",".join(routes.values())]
            self.servers[name] = NatsServer(binary, own, *arguments)

    def start(self) -> None:
        for server in self.servers.values():
            server.start()

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()

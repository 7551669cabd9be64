"""The certificate that HTTPS shows: read again when its files are replaced, as renewals do."""

import asyncio
import ssl

import structlog

from contracts.bus.credentials import file_stamp

LOOK_S = 5.0

_log = structlog.get_logger()


class Certificate:
    """Of two PEM files. New connections get ``context``; open ones keep what they began with."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Raises OSError when the files do not hold a certificate and its key."""
        self._files = (cert_file, key_file)
        self._stamp = self._stamps()
        self.context = self._load()

    async def follow(self) -> None:
        """Look at the files for ever. One that cannot be used changes nothing, and is told."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take what the files hold now, if they were replaced."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.context = self._load()
        except OSError as error:  # ssl.SSLError is one.
            _log.error("certificate_not_replaced", files=self._files, reason=error.strerror or str(error))
        else:
            _log.info("certificate_replaced", files=self._files)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(file_stamp, self._files))

"""How requests are told apart in what a connection brings: by httptools, within a bound. Must not look into a request."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536  # of a request's line and headers, as h11 has it; what came in the same read as their beginning is not counted


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol on httptools, which would keep a head without end, and copy it again at each read."""

    _is_in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """End to count: a body has a bound of its own."""
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take what has come in; refuse when it leaves a head unfinished that has grown too long."""
        before = self.headers  # a list for each request
        super().data_received(data)
        if self._is_in_head and self.headers is before:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")

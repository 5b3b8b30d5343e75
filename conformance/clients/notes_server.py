"""Notes: a small MCP server over stdio for the coding agents: it writes notes.txt, and shows a picture."""

import json
import struct
import sys
import zlib
from base64 import b64encode
from pathlib import Path


def _chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture():
    """A PNG of 16 x 16 red pixels."""
    rows = b"".join(b"\0" + b"\xff\0\0" * 16 for _ in range(16))
    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_TOOLS = [
    {"name": "write_note", "description": "Write a note.", "inputSchema": _TEXT},
    {
        "name": "show_picture",
        "description": "Show the picture.",
        "inputSchema": {"type": "object", "properties": {}},
    },
]


def _call(name, arguments):
    if name == "write_note":
        Path("notes.txt").write_text(arguments["text"], encoding="utf-8")
        return [{"type": "text", "text": f"noted: {arguments['text']}"}]
    image = {"type": "image", "data": b64encode(picture()).decode(), "mimeType": "image/png"}
    return [{"type": "text", "text": "the picture:"}, image]


def _answer(method, params):
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "notes", "version": "1"},
            }
        case "tools/list":
            return {"tools": _TOOLS}
        case "tools/call":
            return {"content": _call(params["name"], params.get("arguments", {}))}
    return {}


def main():
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = _answer(request["method"], request.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()

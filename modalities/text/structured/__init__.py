"""Output that obeys a JSON schema, a regular expression or a grammar; and tool calls."""

"""The HTTP shell: OpenAI and native APIs, metrics, command line."""

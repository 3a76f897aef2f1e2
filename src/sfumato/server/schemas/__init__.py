"""The bodies of requests as pydantic models, and what the API description says of them."""

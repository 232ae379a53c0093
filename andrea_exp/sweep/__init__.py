"""Which runs answer a question, running them, and watching them."""

"""What is wrong inside the engine: its scheduler, its KV pool, its pauses, its weights."""

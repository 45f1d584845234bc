"""The project's own prompts and what is shipped beside them: `make_prompts` writes the .jsonl files from the word lists in this folder."""

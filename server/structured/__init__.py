"""Structured outputs: from typed fields of a request to the text of a llguidance grammar that an answer must follow.

- `language`: a `Language` is a set of texts. Pure functions compose languages; `Language.text()` is the whole grammar
  for the engine (`SamplingParams.grammar`). `generate/answer_rules` combines the fields that constrain an answer, and
  `tools/call_grammar` writes calls as languages.
- `schema.read_schema`: checks a caller's JSON schema and returns the language of its values.
- `tags.read_tags`: the same for a `structural_tag`.
- `quoted.json_text`: a caller's grammar of free texts, for a text inside a string of JSON. `regexes` (by `char_sets`)
  and `larks` read grammars as `trees`, `facts` looks at them, `escaping` rewrites terminals, `quoted_grammar` rewrites
  rules, and `sources` writes trees as text.
- `tagged.text_until`: the same for a text that a model writes as it is, up to an end marker.
- `checker.GrammarChecker`: compiles a grammar in a process of its own, within limits, before the engine gets it.
- `bounds`: limits the size of a grammar before it is built.
"""

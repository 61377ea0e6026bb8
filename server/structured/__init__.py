"""What an answer may be, as a grammar: pure functions from typed wire fields to the text of a llguidance grammar.

The pieces, and what each is called with:

- `language.Language(expression, rules, grammars)` is a set of texts; `.text()` is the whole grammar that the engine is
  given (`SamplingParams.grammar`). Languages are composed by pure functions of the same file:
  `literal(text)`, `pattern(regex)`, `one_of(texts)`, `json_value(schema, is_lenient=False)`, `free_text()`,
  `free_text_until(end)` (the end included), `token(text, token_id)` (a special token, which no free text holds),
  `lark(text)` (a whole grammar of a caller's), `sequence(*languages)`, `either(*languages)`,
  `repeat(language, low, high)` (`high` None: no bound).
- `schema.read_schema(value, where, is_strict)` checks a caller's JSON schema (size, depth, enum entries, keywords)
  and gives the `Language` of its values; raises `RequestError` with the path of what is wrong.
- `formats.answer_language(wire)` is what `response_format`, `structured_outputs`, `regex` and `ebnf` say together: a
  `Language`, or None where the answer is free text.
- `calls`: tool calls as languages.
- `checker.GrammarChecker.check(text, param, tenant)`, awaited: the grammar in the form that the engine takes, once a
  process of its own has compiled it within its limits; tenants take turns. Raises `RequestError`: `invalid_value` with
  the reason, or `server_is_overloaded` where the machine had no time for it.
- `bounds`: how large a grammar may become, counted before it is written; `intervals`: bounds of numbers made exact.
"""

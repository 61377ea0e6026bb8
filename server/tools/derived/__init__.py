"""The format of a model's answers, derived from its chat template.

A model was trained on what its template renders of an assistant's turns, so that is what it writes. `derive` renders
probe conversations that differ in one thing, and reads the format out of the differences:

1. `probes` renders an assistant's turn behind a user's message: content, reasoning, no call, one, two; no argument,
   one, two; a text, a number, an object; and prompts with reasoning switched on, off and not at all.
2. `turn` finds where a turn begins and ends. What all turns begin with is the header. What follows the content is the
   end of the turn.
3. `reasoning` finds the markers around a thought and around the content. A template that drops thoughts may still show
   the markers in its prompts, or cut what they surround out of an earlier turn's content.
4. `calls` looks for the probes' names, keys and values in the turns with calls. All of these are unique words, so the
   text between them is markup. A call ends with the longest text that stands both behind the only call and behind the
   first of two. A call begins with the longest text that stands both before the first name and before the second. The
   rest surrounds all calls, or separates them. Arguments are one JSON object, or texts around each key and value, or
   Python. `fields` makes patterns of these texts.
5. `check` parses other turns by the derived format. A format that does not read them back exactly is dropped, since a
   wrong format is worse than none. If a template's calls have several readings, the first that does is taken.

Derived formats have the types of the formats written by hand (`CallFormat`, `ReasoningFormat`), so it parses and
constrains in the same way. Nothing here knows a family's name. Of the template's source only the strings in its
expressions are read, to try which of them it cuts out.
"""

"""JSON schemas as grammars that are exact to the last digit.

llguidance compiles JSON schemas itself, but reads their numbers as doubles and lets a model write endless digits. So
the schema is written as a grammar here, and llguidance is left what only it can do: patterns of strings and multiples.

`reader` turns keywords into nodes (`shapes`), `writer` turns nodes into a grammar in Lark. `digits` and `numbers` write
intervals of numbers, `strings` and `regexes` the texts of strings.
"""

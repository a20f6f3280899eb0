//! The lexer tells code from comments and from literals, by the compiler's own lexer.
//!
//! The rules ask about words: a path in a doc comment imports nothing, and a word in a string is
//! data.

use ra_ap_rustc_lexer::LiteralKind::{Float, Int};
use ra_ap_rustc_lexer::{FrontmatterAllowed, TokenKind, tokenize};

/// A word, a number or a punctuation mark of the code. A literal of text is one token without its
/// content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it says: a word, a number, one punctuation character, `::`, `'` for a lifetime, or `"`
    /// for a literal of text.
    pub text: String,
    /// The line that it begins at, from 1.
    pub line: usize,
}

/// A source file as tokens of code and words of comments.
#[derive(Debug, Default)]
pub struct Lexed {
    /// The code.
    pub tokens: Vec<Token>,
    /// The words of all comments, in order.
    pub comments: Vec<Token>,
    /// The lines that have code on them, ascending.
    pub code_lines: Vec<usize>,
}

impl Lexed {
    /// What the token at `index` says; nothing behind the last one.
    pub fn text(&self, index: usize) -> &str {
        self.tokens.get(index).map_or("", |token| &token.text)
    }

    /// Whether the tokens from `index` on say `texts`.
    pub fn says(&self, index: usize, texts: &[&str]) -> bool {
        (index..).zip(texts).all(|(index, text)| self.text(index) == *text)
    }

    /// The index behind the bracket that closes the one at `open`.
    pub fn behind(&self, open: usize) -> usize {
        let mut depth = 0usize;
        for (index, token) in self.tokens.iter().enumerate().skip(open) {
            match token.text.as_str() {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" if depth <= 1 => return index + 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
        }
        self.tokens.len()
    }

    /// The trait, if it is by one, and the type of the implementation that begins with `impl` at
    /// `index`: the last words of both outside of angle brackets.
    pub fn implemented(&self, index: usize) -> (&str, &str) {
        let (mut depth, mut of, mut last) = (0usize, "", "");
        for index in index + 1..self.tokens.len() {
            match self.text(index) {
                "<" => depth += 1,
                ">" if self.text(index - 1) != "-" => depth = depth.saturating_sub(1),
                "{" | ";" | "where" if depth == 0 => break,
                "for" if depth == 0 => of = last,
                word if depth == 0 && word.starts_with(char::is_alphabetic) => last = word,
                _ => {}
            }
        }
        (of, last)
    }
}

/// The tokens and comments of `text`.
pub fn lex(text: &str) -> Lexed {
    let mut lexed = Lexed::default();
    let (mut rest, mut line) = (text, 1);
    for token in tokenize(text, FrontmatterAllowed::No) {
        let said = rest.get(..token.len as usize).unwrap_or_default();
        rest = &rest[said.len()..];
        let last = line + said.matches('\n').count();
        match token.kind {
            TokenKind::Whitespace => {}
            TokenKind::LineComment { .. } | TokenKind::BlockComment { .. } => {
                let words = (line..).zip(said.split('\n')).flat_map(|(line, said)| {
                    let words = said.split(|each| !is_word(each)).filter(|word| !word.is_empty());
                    words.map(move |word| Token { text: word.to_owned(), line })
                });
                lexed.comments.extend(words);
            }
            kind => {
                let text = match kind {
                    TokenKind::Lifetime { .. } => "'",
                    TokenKind::Literal { kind: Int { .. } | Float { .. }, .. } => said,
                    TokenKind::Literal { .. } => "\"",
                    _ => said.trim_start_matches("r#"),
                };
                let first = lexed.code_lines.last().map_or(line, |&before| line.max(before + 1));
                lexed.code_lines.extend(first..=last);
                // The two halves of `::` stand side by side wherever there are two.
                match lexed.tokens.last_mut() {
                    Some(before) if text == ":" && before.text == ":" => before.text.push(':'),
                    _ => lexed.tokens.push(Token { text: text.to_owned(), line }),
                }
            }
        }
        line = last;
    }
    lexed
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let tokens = lex(text).tokens;
        tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn literals_have_no_content() {
        assert_eq!(
            code(r#"f("a // \" b", 'x', '\'', '"', b'\\', b"q", c"q")"#).matches('"').count(),
            7
        );
        assert_eq!(code("r#\"a \" unsafe\"# + br##\"\"#\"## + x"), "\" + \" + x");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_not_literals() {
        assert_eq!(code("fn f<'a>(x: &'a u8, r#type: T)"), "fn f < ' > ( x : & ' u8 , type : T )");
        assert_eq!(code("'outer: loop { break 'outer }"), "' : loop { break ' }");
    }

    #[test]
    fn comments_nest_and_are_not_code() {
        let lexed = lex("a /* b /* c */ d */ e // f\n/// g\nh");
        assert_eq!(code("a /* b /* c */ d */ e // f\n/// g\nh"), "a e h");
        let words: Vec<_> = lexed.comments.iter().map(|w| (w.text.as_str(), w.line)).collect();
        assert_eq!(words, [("b", 1), ("c", 1), ("d", 1), ("f", 1), ("g", 2)]);
    }

    #[test]
    fn every_line_of_a_literal_is_code_and_no_line_of_a_comment() {
        let lexed = lex("// one\n\nlet x = \"three\n\nfive\";\n/* six\n*/\n");
        assert_eq!(lexed.code_lines, [3, 4, 5]);
        assert_eq!(lexed.tokens.last().map(|token| token.line), Some(5));
    }
}

//! Enough of Rust's lexical structure to tell code from comments and from literals.
//!
//! The rules ask about words: a path in a doc comment imports nothing, and a word in a string is
//! data.

/// A word or a punctuation mark of the code. Literals are one token without their content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it says: a word, one punctuation character, `::`, or `"` for a literal.
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
}

/// The tokens and comments of `text`.
pub fn lex(text: &str) -> Lexed {
    let mut lexer =
        Lexer { chars: text.chars().collect(), at: 0, line: 1, lexed: Lexed::default() };
    while lexer.peek(0).is_some() {
        lexer.step();
    }
    lexer.lexed
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    lexed: Lexed,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn bump(&mut self) -> Option<char> {
        let next = self.peek(0)?;
        self.at += 1;
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn step(&mut self) {
        let Some(next) = self.peek(0) else { return };
        match (next, self.peek(1)) {
            (space, _) if space.is_whitespace() => {
                self.bump();
            }
            ('/', Some('/')) => self.line_comment(),
            ('/', Some('*')) => self.block_comment(),
            ('"', _) => self.string(),
            ('\'', _) => self.quote(),
            (':', Some(':')) => {
                self.bump();
                self.bump();
                self.push("::".to_owned(), self.line);
            }
            (word, _) if is_word(word) => self.word(),
            (mark, _) => {
                self.bump();
                self.push(mark.to_string(), self.line);
            }
        }
    }

    /// Adds a token that began at `line` and ends here.
    fn push(&mut self, text: String, line: usize) {
        for line in line..=self.line {
            if self.lexed.code_lines.last() != Some(&line) {
                self.lexed.code_lines.push(line);
            }
        }
        self.lexed.tokens.push(Token { text, line });
    }

    fn word(&mut self) {
        let mut word = String::new();
        while let Some(next) = self.peek(0).filter(|&next| is_word(next)) {
            word.push(next);
            self.bump();
        }
        match (word.as_str(), self.peek(0)) {
            ("r" | "br" | "cr", Some('"' | '#')) => self.raw(),
            ("b" | "c", Some('"')) => self.string(),
            ("b", Some('\'')) => self.quote(),
            _ => self.push(word, self.line),
        }
    }

    /// Behind the `r`: a raw string, or an identifier that would be a keyword.
    fn raw(&mut self) {
        let line = self.line;
        let mut hashes = 0;
        while self.peek(0) == Some('#') {
            hashes += 1;
            self.bump();
        }
        if self.peek(0) != Some('"') {
            return;
        }
        self.bump();
        while let Some(next) = self.bump() {
            if next == '"' && (0..hashes).all(|ahead| self.peek(ahead) == Some('#')) {
                self.at += hashes;
                break;
            }
        }
        self.push("\"".to_owned(), line);
    }

    fn string(&mut self) {
        let line = self.line;
        self.bump();
        while let Some(next) = self.bump() {
            match next {
                '\\' => {
                    self.bump();
                }
                '"' => break,
                _ => {}
            }
        }
        self.push("\"".to_owned(), line);
    }

    /// A character or a lifetime.
    fn quote(&mut self) {
        self.bump();
        if self.peek(0) != Some('\\') && self.peek(1) != Some('\'') {
            while self.peek(0).is_some_and(is_word) {
                self.bump();
            }
            return self.push("'".to_owned(), self.line);
        }
        while let Some(next) = self.bump() {
            match next {
                '\\' => {
                    self.bump();
                }
                '\'' => break,
                _ => {}
            }
        }
        self.push("\"".to_owned(), self.line);
    }

    fn line_comment(&mut self) {
        while self.peek(0).is_some_and(|next| next != '\n') {
            self.comment_word();
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0usize;
        while let Some(next) = self.peek(0) {
            match (next, self.peek(1)) {
                ('/', Some('*')) => depth += 1,
                ('*', Some('/')) => depth -= 1,
                _ => {
                    self.comment_word();
                    continue;
                }
            }
            self.at += 2;
            if depth == 0 {
                return;
            }
        }
    }

    /// Takes a word of a comment, or a character between words.
    fn comment_word(&mut self) {
        let mut word = String::new();
        while let Some(next) = self.peek(0).filter(|&next| is_word(next)) {
            word.push(next);
            self.bump();
        }
        if word.is_empty() {
            self.bump();
        } else {
            self.lexed.comments.push(Token { text: word, line: self.line });
        }
    }
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

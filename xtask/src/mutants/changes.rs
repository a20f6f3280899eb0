//! The changes of a source file: what somebody who errs could have written in its place.
//!
//! All changes of a file are in one text, each behind a switch, so that one build has them all.

use std::ops::Range;

use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{BinOp, Block, Expr, ReturnType, Stmt, Type};

/// A change.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// The function that it is in, what is done and to which text: the same wherever that moves.
    pub(super) name: String,
    /// What it takes the place of.
    range: Range<usize>,
    how: How,
}

/// How the text at a change looks, with the switch of the change in it.
#[derive(Clone, Debug)]
enum How {
    /// It is left out.
    Without,
    /// A condition that is always met, or never.
    Forced(bool),
    /// Another expression.
    Instead(String),
    /// Other statements.
    Others(String),
    /// An arm of a match is never taken.
    Guarded,
    /// Something before it.
    Before(String),
}

impl Change {
    /// What stands before and behind the text, with the switch of this number.
    fn around(&self, number: usize) -> (String, &'static str) {
        let at = format!("crate::mutants::at({number})");
        match &self.how {
            How::Without => (format!("if {at} {{}} else {{ "), " }"),
            How::Forced(true) => (format!("({at} || ("), "))"),
            How::Forced(false) => (format!("(!{at} && ("), "))"),
            How::Instead(other) => (format!("(if {at} {{ {other} }} else {{ "), " })"),
            How::Others(other) => (format!("if {at} {{ {other} }} else {{ "), " }"),
            How::Guarded => (format!(" if !{at}"), ""),
            How::Before(other) => (format!("if {at} {{ {other} }} "), ""),
        }
    }
}

/// The text with all of these changes in it, each with its number, and where each is then.
pub(super) fn with_switches(
    text: &str,
    changes: &[(usize, &Change)],
) -> (String, Vec<(usize, Range<usize>)>) {
    // What encloses others begins before them and ends behind them.
    let mut ends: Vec<(usize, bool, usize, usize)> = Vec::new();
    for (n, (_, change)) in changes.iter().enumerate() {
        let Range { start, end } = change.range;
        ends.push((start, true, usize::MAX - end, n));
        if start < end {
            ends.push((end, false, usize::MAX - start, usize::MAX - n));
        }
    }
    ends.sort_unstable();
    let (mut out, mut at, mut starts) = (String::new(), 0, vec![0; changes.len()]);
    let mut places = Vec::new();
    for (place, begins, _, n) in ends {
        out.push_str(&text[at..place]);
        at = place;
        let n = if begins { n } else { usize::MAX - n };
        let (number, change) = changes[n];
        let (before, behind) = change.around(number);
        if begins {
            starts[n] = out.len();
            out.push_str(&before);
        } else {
            out.push_str(behind);
        }
        if !begins || change.range.is_empty() {
            places.push((number, starts[n]..out.len()));
        }
    }
    out.push_str(&text[at..]);
    (out, places)
}

/// The change that somebody wrote down: `from`, which is once in the text, becomes `to`.
pub(super) fn planted(text: &str, from: &str, to: &str) -> Option<Change> {
    let (start, None) = (text.find(from)?, text.match_indices(from).nth(1)) else { return None };
    let instead = if to.is_empty() { "nothing".to_owned() } else { line(to) };
    let name = format!("planted: {} => {instead}", line(from));
    let range = start..start + from.len();
    let is_statement = from.ends_with([';', '}']);
    let how = if is_statement { How::Others(to.to_owned()) } else { How::Instead(to.to_owned()) };
    Some(Change { name, range, how })
}

/// Text as one line.
fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All changes of a file.
pub(super) fn find(text: &str) -> Result<Vec<Change>, String> {
    let file = syn::parse_file(text).map_err(|error| error.to_string())?;
    let mut finder =
        Finder { text, function: Vec::new(), found: Vec::new(), in_condition: Vec::new() };
    finder.visit_file(&file);
    Ok(finder.found)
}

struct Finder<'t> {
    text: &'t str,
    function: Vec<String>,
    found: Vec<Change>,
    /// Where conditions are, which are forced.
    in_condition: Vec<Range<usize>>,
}

/// Methods that are mistaken for each other.
const METHODS: &[(&str, &str)] = &[
    ("min", "max"),
    ("any", "all"),
    ("is_some", "is_none"),
    ("is_ok", "is_err"),
    ("is_some_and", "is_none_or"),
    ("start", "last"),
    ("first", "last"),
    ("last_mut", "first_mut"),
    ("wrapping_add", "wrapping_sub"),
    ("saturating_add", "saturating_sub"),
    ("checked_add", "checked_sub"),
    ("and", "or"),
    ("trailing_zeros", "leading_zeros"),
];

/// Methods that can be left out.
const NARROWING: &[&str] =
    &["min", "max", "filter", "wrapping_add", "wrapping_sub", "saturating_add", "saturating_sub"];

/// Methods that take a closure that answers yes or no.
const ASKING: &[&str] = &[
    "filter",
    "any",
    "all",
    "find",
    "position",
    "take_while",
    "skip_while",
    "is_some_and",
    "is_none_or",
    "retain",
    "take_if",
];

/// Values that are mistaken for each other.
const VALUES: &[(&str, &str)] = &[
    ("Tables::Detached", "Tables::Kept"),
    ("Then::Stay", "Then::Go"),
    ("Ahead::Check", "Ahead::Checked"),
    ("Covered::Detach", "Covered::Keep"),
    ("Others::Wait", "Others::Skip"),
    ("Walks::Keep", "Walks::Forget"),
    ("Walks::Kept", "Walks::Forgotten"),
    ("Need::Room", "Need::Done"),
    ("Stage::First", "Stage::Second"),
];

fn other(pairs: &[(&'static str, &'static str)], name: &str) -> Option<&'static str> {
    pairs.iter().find_map(|&(one, two)| match name {
        _ if name == one => Some(two),
        _ if name == two => Some(one),
        _ => None,
    })
}

impl Finder<'_> {
    fn add(&mut self, range: Range<usize>, what: &str, how: How) {
        let name = format!("{}: {what}", self.function.join("::"));
        self.found.push(Change { name, range, how });
    }

    fn said(&self, range: &Range<usize>) -> String {
        let text = line(&self.text[range.clone()]);
        let end = text.char_indices().nth(90).map_or(text.len(), |(at, _)| at);
        text[..end].to_owned()
    }

    fn without(&mut self, of: &impl syn::spanned::Spanned) {
        let range = of.span().byte_range();
        self.add(range.clone(), &format!("without {}", self.said(&range)), How::Without);
    }

    fn forced(&mut self, of: &Expr, value: bool) {
        let range = of.span().byte_range();
        self.add(range.clone(), &format!("{value} for {}", self.said(&range)), How::Forced(value));
    }

    fn instead(&mut self, of: &Expr, other: String) {
        let range = of.span().byte_range();
        let what = format!("{} for {}", line(&other), self.said(&range));
        self.add(range, &what, How::Instead(other));
    }

    /// A condition: each of its parts is left out, and all of it is never met.
    fn condition(&mut self, of: &Expr) {
        self.parts(of);
        let mut first = of;
        while let Expr::Binary(binary) = first
            && matches!(binary.op, BinOp::And(_))
        {
            first = &binary.left;
        }
        if !matches!(first, Expr::Let(_)) {
            self.forced(first, false);
        }
        if !matches!(of, Expr::Binary(binary) if matches!(binary.op, BinOp::And(_) | BinOp::Or(_)))
            && !matches!(of, Expr::Let(_))
        {
            self.forced(of, true);
        }
    }

    /// Each part of a condition of several is left out.
    fn parts(&mut self, of: &Expr) {
        self.in_condition.push(of.span().byte_range());
        let Expr::Binary(binary) = of else { return };
        let neutral = match binary.op {
            BinOp::And(_) => true,
            BinOp::Or(_) => false,
            _ => return,
        };
        for part in [&*binary.left, &*binary.right] {
            let is_same = matches!(part, Expr::Binary(it) if matches!((&it.op, neutral),
                (BinOp::And(_), true) | (BinOp::Or(_), false)));
            if !is_same && !matches!(part, Expr::Let(_)) {
                self.forced(part, neutral);
            }
            self.parts(part);
        }
    }

    /// The last expression of a block of type `()`.
    fn tail(&mut self, of: &Expr) {
        match of {
            Expr::Call(_)
            | Expr::MethodCall(_)
            | Expr::Assign(_)
            | Expr::ForLoop(_)
            | Expr::Loop(_) => {
                self.without(of);
            }
            Expr::If(it) => {
                self.unit(&it.then_branch);
                it.else_branch.iter().for_each(|(_, other)| self.tail(other));
            }
            Expr::Match(it) => it.arms.iter().for_each(|arm| self.tail(&arm.body)),
            Expr::Block(it) => self.unit(&it.block),
            _ => {}
        }
    }

    fn unit(&mut self, block: &Block) {
        if let Some(Stmt::Expr(tail, None)) = block.stmts.last() {
            self.tail(tail);
        }
    }

    fn function(&mut self, sig: &syn::Signature, block: &Block, visit: impl FnOnce(&mut Self)) {
        if sig.constness.is_some() {
            return;
        }
        self.function.push(sig.ident.to_string());
        let answers: &[&str] = match &sig.output {
            ReturnType::Default => {
                self.unit(block);
                if block.stmts.len() > 1 { &["return"] } else { &[] }
            }
            ReturnType::Type(_, kind) => match &self.text[kind.span().byte_range()] {
                "bool" => &["return true", "return false"],
                "u32" | "u64" | "usize" => &["return 0", "return 1"],
                kind if kind.starts_with("Option<") => &["return None"],
                kind if kind.starts_with("Result<(),") => &["return Ok(())"],
                _ => &[],
            },
        };
        let at = block.brace_token.span.open().byte_range().end;
        for answer in answers {
            self.add(at..at, answer, How::Before(format!("{answer};")));
        }
        visit(self);
        self.function.pop();
    }

    fn binary(&mut self, whole: &Expr, of: &syn::ExprBinary) {
        let range = of.span().byte_range();
        let is_condition = self.in_condition.contains(&range);
        let other = match of.op {
            BinOp::Lt(_) => "<=",
            BinOp::Le(_) => "<",
            BinOp::Gt(_) => ">=",
            BinOp::Ge(_) => ">",
            BinOp::Eq(_) if !is_condition => "!=",
            BinOp::Ne(_) if !is_condition => "==",
            BinOp::Add(_) => "-",
            BinOp::Sub(_) => "+",
            BinOp::BitAnd(_) => "|",
            BinOp::BitOr(_) => "&",
            BinOp::Shl(_) => ">>",
            BinOp::Shr(_) => "<<",
            BinOp::AddAssign(_) => "-=",
            BinOp::SubAssign(_) => "+=",
            BinOp::BitOrAssign(_) => "=",
            _ => return,
        };
        let text = |part: &Expr| &self.text[part.span().byte_range()];
        let other = format!("{} {other} {}", text(&of.left), text(&of.right));
        self.instead(whole, other);
    }
}

fn is_of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|it| it.path().is_ident("cfg") || it.path().is_ident("test"))
}

impl<'a> Visit<'a> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_of_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.function(&item.sig, &item.block, |this| this.visit_block(&item.block));
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if item.trait_.as_ref().is_some_and(|(_, path, _)| {
            path.segments.last().is_some_and(|it| it.ident == "Debug" || it.ident == "Display")
        }) {
            return;
        }
        let Type::Path(owner) = &*item.self_ty else { return visit::visit_item_impl(self, item) };
        self.function
            .push(owner.path.segments.last().map_or(String::new(), |it| it.ident.to_string()));
        visit::visit_item_impl(self, item);
        self.function.pop();
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.function(&item.sig, &item.block, |this| this.visit_block(&item.block));
    }

    fn visit_block(&mut self, block: &'a Block) {
        for (n, statement) in block.stmts.iter().enumerate() {
            let is_last = n + 1 == block.stmts.len();
            match statement {
                Stmt::Expr(Expr::Return(_) | Expr::Break(_) | Expr::Continue(_), _) => {
                    // As the last statement it may be there for the block's type.
                    if block.stmts.len() == 1 || !is_last {
                        self.without(statement);
                    }
                }
                Stmt::Expr(Expr::If(_) | Expr::Macro(_), _) => {}
                Stmt::Expr(_, None) if is_last => {}
                // What was moved away has to come back.
                Stmt::Expr(Expr::Assign(it), _)
                    if self.text[it.span().byte_range()].ends_with(".lock()") => {}
                Stmt::Expr(..) => self.without(statement),
                Stmt::Local(local) if matches!(local.pat, syn::Pat::Wild(_)) => {
                    self.without(statement)
                }
                _ => {}
            }
        }
        visit::visit_block(self, block);
    }

    fn visit_local(&mut self, local: &'a syn::Local) {
        let Some(init) = &local.init else { return };
        self.visit_expr(&init.expr);
        // The branch has to leave, so that its end cannot be left out.
        let Some((_, diverge)) = &init.diverge else { return };
        if let Expr::Block(diverge) = &**diverge {
            let kept = diverge.block.stmts.last().map(|it| it.span().byte_range());
            let mut before = std::mem::take(&mut self.found);
            self.visit_block(&diverge.block);
            self.found.retain(|it| Some(&it.range) != kept.as_ref());
            before.append(&mut self.found);
            self.found = before;
        }
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        match expr {
            Expr::If(it) => {
                self.condition(&it.cond);
                if it.else_branch.is_none() {
                    self.unit(&it.then_branch);
                }
            }
            Expr::While(it) => {
                if !matches!(*it.cond, Expr::Let(_)) {
                    self.parts(&it.cond);
                }
                self.unit(&it.body);
            }
            Expr::ForLoop(it) => self.unit(&it.body),
            Expr::Loop(it) => self.unit(&it.body),
            Expr::Binary(it) if matches!(it.op, BinOp::And(_) | BinOp::Or(_)) => {
                if !self.in_condition.contains(&it.span().byte_range()) {
                    self.parts(expr);
                }
            }
            Expr::Binary(it) => self.binary(expr, it),
            Expr::Unary(it) if matches!(it.op, syn::UnOp::Not(_)) => {
                if !self.in_condition.contains(&it.span().byte_range()) {
                    self.instead(expr, self.text[it.expr.span().byte_range()].to_owned());
                }
            }
            Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(it), .. }) => {
                let other = match it.base10_digits() {
                    "0" => "1".to_owned(),
                    "1" => "0".to_owned(),
                    _ => format!("{it} + 1"),
                };
                self.instead(expr, other);
            }
            Expr::Lit(syn::ExprLit { lit: syn::Lit::Bool(it), .. }) => {
                self.instead(expr, (!it.value).to_string());
            }
            Expr::Path(it) => {
                let text = &self.text[it.span().byte_range()];
                if let Some(other) = other(VALUES, text) {
                    self.instead(expr, other.to_owned());
                }
            }
            Expr::MethodCall(it) => {
                let name = it.method.to_string();
                let range = expr.span().byte_range();
                let (before, behind) = (it.method.span().byte_range(), range.end);
                let head = self.text[range.start..before.start].to_owned();
                if let Some(other) = other(METHODS, &name) {
                    let rest = &self.text[before.end..behind];
                    self.instead(expr, format!("{head}{other}{rest}"));
                }
                if NARROWING.contains(&name.as_str()) {
                    self.instead(expr, self.text[it.receiver.span().byte_range()].to_owned());
                }
                if ASKING.contains(&name.as_str())
                    && let Some(Expr::Closure(closure)) = it.args.first()
                    && !matches!(*closure.body, Expr::Block(_))
                {
                    self.condition(&closure.body);
                }
            }
            Expr::Match(it) => {
                let takes_all = |pat: &syn::Pat| match pat {
                    syn::Pat::Wild(_) => true,
                    syn::Pat::Ident(it) => {
                        it.subpat.is_none() && it.ident.to_string().starts_with(char::is_lowercase)
                    }
                    _ => false,
                };
                let has_rest =
                    it.arms.last().is_some_and(|it| takes_all(&it.pat) && it.guard.is_none());
                for arm in &it.arms[..it.arms.len().saturating_sub(1)] {
                    if let Some((_, guard)) = &arm.guard {
                        self.condition(guard);
                    } else if has_rest {
                        let (pat, end) =
                            (arm.pat.span().byte_range(), arm.pat.span().byte_range().end);
                        let what = format!("without {} =>", self.said(&pat));
                        self.add(end..end, &what, How::Guarded);
                    }
                }
            }
            Expr::Repeat(it) => return self.visit_expr(&it.expr),
            Expr::Const(_) => return,
            _ => {}
        }
        visit::visit_expr(self, expr);
    }

    fn visit_item_const(&mut self, _: &'a syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'a syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'a syn::ImplItemConst) {}
    fn visit_type(&mut self, _: &'a Type) {}
    fn visit_pat(&mut self, _: &'a syn::Pat) {}
    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}
    fn visit_generic_argument(&mut self, _: &'a syn::GenericArgument) {}
    fn visit_generics(&mut self, _: &'a syn::Generics) {}
}

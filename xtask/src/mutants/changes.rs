//! The changes of a source file: what somebody who errs could have written in its place.
//!
//! All changes of a file are in one text, each behind a switch, so that one build has them all.

use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Block, Expr, Pat, ReturnType, Stmt};

/// A change.
pub(super) struct Change {
    /// The function that it is in, what is done and to which text: the same wherever that moves.
    pub(super) name: String,
    /// The text that is changed.
    range: Range<usize>,
    /// Code before that text, whose first `@` is whether the change is in force.
    before: String,
    /// Code behind it.
    behind: &'static str,
    /// What its switch is called.
    pub(super) number: u32,
    /// Where it is in the text with switches.
    pub(super) place: Range<usize>,
}

impl Change {
    fn new(name: String, range: Range<usize>, before: String, behind: &'static str) -> Self {
        Self { name, range, before, behind, number: 0, place: 0..0 }
    }
}

/// The text with all of these changes in it.
pub(super) fn with_switches(text: &str, changes: &mut [&mut Change]) -> String {
    // What encloses others begins before them and ends behind them.
    let mut ends = Vec::new();
    for (n, change) in changes.iter().enumerate() {
        let Range { start, end } = change.range;
        ends.push((start, true, usize::MAX - end, n));
        ends.push((end, false, usize::MAX - start, usize::MAX - n));
    }
    ends.sort_unstable();
    let (mut out, mut at) = (String::new(), 0);
    for (place, begins, _, n) in ends {
        out.push_str(&text[at..place]);
        at = place;
        let change = &mut changes[if begins { n } else { usize::MAX - n }];
        if begins {
            let switch = format!("crate::mutants::at({})", change.number);
            let before = change.before.replacen('@', &switch, 1);
            change.place = out.len()..out.len() + before.len();
            out.push_str(&before);
        } else {
            out.push_str(change.behind);
            change.place.end = out.len();
        }
    }
    out + &text[at..]
}

/// The change that somebody wrote down: `from`, which is once in the text, becomes `to`.
pub(super) fn planted(text: &str, from: &str, to: &str) -> Option<Change> {
    let (start, None) = (text.find(from)?, text.match_indices(from).nth(1)) else { return None };
    let instead = if to.is_empty() { "nothing" } else { to };
    let name = format!("planted: {} => {}", line(from), line(instead));
    let is_statement = from.ends_with([';', '}']);
    let (open, behind) = if is_statement { ("", " }") } else { ("(", " })") };
    let before = format!("{open}if @ {{ {to} }} else {{ ");
    Some(Change::new(name, start..start + from.len(), before, behind))
}

/// Text as one line.
fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All changes of a file.
pub(super) fn find(text: &str) -> Result<Vec<Change>, String> {
    let file = syn::parse_file(text).map_err(|error| error.to_string())?;
    let mut finder = Finder { text, function: Vec::new(), found: Vec::new() };
    finder.visit_file(&file);
    Ok(finder.found)
}

struct Finder<'t> {
    text: &'t str,
    /// The type and the functions around.
    function: Vec<&'t str>,
    found: Vec<Change>,
}

/// The name that is mistaken for this one.
fn mistaken(name: &str) -> Option<&'static str> {
    super::lines(include_str!("../../mutants/pairs.txt")).find_map(|line| {
        let (one, two) = line.split_once(' ')?;
        [(one, two), (two, one)].into_iter().find(|it| it.0 == name).map(|it| it.1)
    })
}

impl<'t> Finder<'t> {
    fn source(&self, of: &impl Spanned) -> &'t str {
        &self.text[of.span().byte_range()]
    }

    fn add(&mut self, range: Range<usize>, what: &str, before: String, behind: &'static str) {
        let name = format!("{}: {what}", self.function.join("::"));
        self.found.push(Change::new(name, range, before, behind));
    }

    /// A change of all of this, whose text follows `what` in the name.
    fn around(&mut self, of: &impl Spanned, what: &str, before: String, behind: &'static str) {
        let said: String = line(self.source(of)).chars().take(90).collect();
        self.add(of.span().byte_range(), &format!("{what} {said}"), before, behind);
    }

    fn without(&mut self, of: &impl Spanned) {
        self.around(of, "without", "if @ {} else { ".into(), " }");
    }

    /// A condition, or a part of one, is always met: nothing may be around `let`.
    fn always(&mut self, of: &Expr) {
        if !self.source(of).contains("let ") {
            self.around(of, "true for", "(@ || (".into(), "))");
        }
    }

    fn never(&mut self, of: &Expr) {
        let has_let = self.source(of).contains("let ");
        let (before, behind) = if has_let { ("!@ && ", "") } else { ("(!@ && (", "))") };
        self.around(of, "false for", before.into(), behind);
    }

    fn condition(&mut self, of: &Expr) {
        self.never(of);
        self.always(of);
    }

    fn instead(&mut self, of: &impl Spanned, other: &str) {
        let before = format!("(if @ {{ {other} }} else {{ ");
        self.around(of, &format!("{} for", line(other)), before, " })");
    }

    /// A part of an expression becomes what it is mistaken for.
    fn mistaken(&mut self, of: &impl Spanned, part: &impl Spanned) {
        let Some(other) = mistaken(self.source(part)) else { return };
        let (all, part) = (of.span().byte_range(), part.span().byte_range());
        let (head, tail) = (&self.text[all.start..part.start], &self.text[part.end..all.end]);
        self.instead(of, &format!("{head}{other}{tail}"));
    }

    /// A function answers at once, and then all changes of its body.
    fn function(&mut self, sig: &syn::Signature, block: &Block) {
        if sig.constness.is_some() || sig.ident == "fmt" {
            return;
        }
        self.function.push(self.source(&sig.ident));
        let answers: &[&str] = match &sig.output {
            ReturnType::Default => &["return"],
            ReturnType::Type(_, kind) => match self.source(kind) {
                "bool" => &["return true", "return false"],
                "u32" | "u64" | "usize" => &["return 0", "return 1"],
                kind if kind.starts_with("Option<") => &["return None"],
                kind if kind.starts_with("Result<(),") => &["return Ok(())"],
                _ => &[],
            },
        };
        let at = block.brace_token.span.open().byte_range().end;
        for answer in answers {
            self.add(at..at, answer, format!("if @ {{ {answer}; }} "), "");
        }
        self.visit_block(block);
        self.function.pop();
    }

    fn binary(&mut self, of: &syn::ExprBinary) {
        self.mistaken(of, &of.op);
        let parts = [&*of.left, &*of.right];
        match of.op {
            BinOp::And(_) => parts.into_iter().for_each(|it| self.always(it)),
            BinOp::Or(_) => parts.into_iter().for_each(|it| self.never(it)),
            _ => {}
        }
    }

    /// Another method is called, or the closure answers otherwise.
    fn method(&mut self, of: &syn::ExprMethodCall) {
        self.mistaken(of, &of.method);
        if let "filter" | "any" | "all" | "find" | "position" | "take_while" | "skip_while"
        | "is_some_and" | "is_none_or" | "retain" | "take_if" = self.source(&of.method)
            && let Some(Expr::Closure(closure)) = of.args.first()
            && !matches!(*closure.body, Expr::Block(_))
        {
            self.condition(&closure.body);
        }
    }
}

impl<'a> Visit<'a> for Finder<'_> {
    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.function(&item.sig, &item.block);
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        self.function.extend(self.source(&item.self_ty).split('<').next());
        visit::visit_item_impl(self, item);
        self.function.pop();
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
    }

    fn visit_stmt(&mut self, statement: &'a Stmt) {
        let is_left_out = match statement {
            Stmt::Expr(Expr::ForLoop(_) | Expr::While(_), _) => true,
            Stmt::Expr(Expr::Return(_) | Expr::Break(_) | Expr::Continue(_), _) => false,
            // Borrows end and begin again here, which the compiler would miss far away.
            Stmt::Expr(it, Some(_)) => {
                !self.source(it).ends_with(".lock()") && !self.source(it).starts_with("drop(")
            }
            Stmt::Local(local) => matches!(local.pat, Pat::Wild(_)),
            _ => false,
        };
        if is_left_out {
            self.without(statement);
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        match expr {
            Expr::If(it) => self.condition(&it.cond),
            Expr::Binary(it) => self.binary(it),
            Expr::Lit(_) => self.mistaken(expr, expr),
            Expr::Path(it) if it.path.segments.len() > 1 => self.mistaken(it, it),
            Expr::MethodCall(it) => self.method(it),
            Expr::Match(it) => {
                let guards = it.arms.iter().filter_map(|arm| arm.guard.as_ref());
                guards.for_each(|(_, guard)| self.condition(guard));
            }
            Expr::Repeat(it) => return self.visit_expr(&it.expr),
            Expr::Const(_) => return,
            _ => {}
        }
        visit::visit_expr(self, expr);
    }

    // Those in these files are tests and constants.
    fn visit_item_mod(&mut self, _: &'a syn::ItemMod) {}
    fn visit_item_const(&mut self, _: &'a syn::ItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'a syn::ImplItemConst) {}
    fn visit_type(&mut self, _: &'a syn::Type) {}
    fn visit_pat(&mut self, _: &'a Pat) {}
    fn visit_generic_argument(&mut self, _: &'a syn::GenericArgument) {}
}

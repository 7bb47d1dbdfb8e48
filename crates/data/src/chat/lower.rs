//! Rewrites templates so that every value they create passes through a limit.
//!
//! The engine counts instructions, not bytes, and one instruction may double a string. It has no hook for counting
//! bytes, so the template itself is rewritten. The engine's own parser reads it, and this module prints an equivalent
//! template from the syntax tree: operators that create strings or lists become filters of ours, the results of
//! literals, slices, filters and calls pass through a filter ([`bounds`](super::bounds)), and text between tags
//! becomes an expression. Nothing of the source is copied, so no construct that creates a value can be missed.
//!
//! Line numbers stay the same, and [`LoweredTemplate::original`] finds the original code that an error refers to.

use std::fmt::Write as _;
use std::ops::Range;

use minijinja::machinery::{Span, Token, ast, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind};

use super::bounds::{ADD, CAT, CHARGE, ITER, MUL, NEW};

/// A template in the form that is compiled.
#[derive(Debug)]
pub(crate) struct LoweredTemplate {
    pub(crate) source: String,
    /// Byte ranges of `source`, and the corresponding ranges of the original template.
    spans: Vec<(Range<usize>, Range<usize>)>,
}

impl LoweredTemplate {
    pub(crate) fn new(source: &str, name: &str, syntax: SyntaxConfig) -> Result<Self, Error> {
        check_depth(source, syntax.clone())?;
        let template = parse(source, name, syntax)?;
        let mut printer =
            Printer { out: String::with_capacity(2 * source.len()), line: 1, spans: Vec::new() };
        printer.statement(&template);
        Ok(LoweredTemplate { source: printer.out, spans: printer.spans })
    }

    /// The range of the original template that corresponds to a range of [`LoweredTemplate::source`].
    pub(crate) fn original(&self, part: Range<usize>) -> Option<Range<usize>> {
        let around = self.spans.iter().filter(|(here, _)| here.start <= part.start && part.end <= here.end);
        around.min_by_key(|(here, _)| here.len()).map(|(_, there)| there.clone())
    }
}

/// Limits on the tokens of one tag and on the `elif` tags of a template, far above what templates need. They protect
/// the stack: the parser limits nested brackets, but a chain of operators or conditions is a tree as deep as it is
/// long.
const MAX_TAG_TOKENS: usize = 2000;
const MAX_ELIFS: usize = 500;

fn check_depth(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let (mut in_tag, mut elifs) = (0, 0);
    for token in tokenize(source, false, syntax) {
        match token?.0 {
            Token::BlockStart | Token::VariableStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => in_tag += 1,
        }
        if in_tag > MAX_TAG_TOKENS || elifs > MAX_ELIFS {
            let what = match elifs > MAX_ELIFS {
                true => format!("the template has more than {MAX_ELIFS} elif branches"),
                false => format!("a tag has more than {MAX_TAG_TOKENS} tokens"),
            };
            return Err(Error::new(ErrorKind::SyntaxError, what));
        }
    }
    Ok(())
}

struct Printer {
    out: String,
    /// The line that is being written, from 1.
    line: usize,
    spans: Vec<(Range<usize>, Range<usize>)>,
}

impl Printer {
    fn put(&mut self, text: &str) {
        self.out.push_str(text);
    }

    /// Adds newlines up to the line of `span`. Only used inside a tag, where newlines have no effect.
    fn line_of(&mut self, span: Span) {
        while self.line < usize::from(span.start_line) {
            self.out.push('\n');
            self.line += 1;
        }
    }

    fn record(&mut self, start: usize, span: Span) {
        self.spans.push((start..self.out.len(), span.start_offset as usize..span.end_offset as usize));
    }

    fn body(&mut self, statements: &[ast::Stmt<'_>]) {
        statements.iter().for_each(|statement| self.statement(statement));
    }

    /// Prints `{% keyword` on its line. Returns where the keyword begins.
    fn tag(&mut self, keyword: &str, span: Span) -> usize {
        self.put("{% ");
        self.line_of(span);
        let start = self.out.len();
        self.put(keyword);
        self.put(" ");
        start
    }

    fn end(&mut self, keyword: &str) {
        self.put("{% ");
        self.put(keyword);
        self.put(" %}");
    }

    fn statement(&mut self, statement: &ast::Stmt<'_>) {
        use ast::Stmt;
        match statement {
            Stmt::Template(template) => self.body(&template.children),
            Stmt::EmitRaw(raw) if raw.raw.is_empty() => {}
            Stmt::EmitRaw(raw) => {
                self.put("{{ ");
                self.line_of(raw.span());
                self.quoted(raw.raw);
                self.put(" }}");
            }
            Stmt::EmitExpr(emit) => {
                self.put("{{ ");
                match &emit.expr {
                    // The formatter counts the output. A call stays a plain call, because `loop(...)` is a recursive
                    // loop.
                    ast::Expr::Call(call) => self.call(call),
                    expr => self.expr(expr),
                }
                self.put(" }}");
            }
            Stmt::ForLoop(node) => self.for_loop(node),
            Stmt::IfCond(node) => {
                self.tag("if", node.span());
                self.condition(node);
            }
            Stmt::Set(node) => {
                self.tag("set", node.span());
                self.target(&node.target);
                self.put(" = ");
                self.expr(&node.expr);
                self.put(" %}");
            }
            Stmt::Do(node) => {
                self.tag("do", node.span());
                self.call(&node.call);
                self.put(" %}");
            }
            Stmt::Continue(node) => {
                self.tag("continue", node.span());
                self.put("%}");
            }
            Stmt::Break(node) => {
                self.tag("break", node.span());
                self.put("%}");
            }
            other => self.block_statement(other),
        }
    }

    /// Statements with a body and an end tag, other than loops and conditions.
    fn block_statement(&mut self, statement: &ast::Stmt<'_>) {
        use ast::Stmt;
        match statement {
            Stmt::WithBlock(node) => {
                self.tag("with", node.span());
                for (idx, (target, value)) in node.assignments.iter().enumerate() {
                    self.put(if idx > 0 { ", " } else { "" });
                    self.nested_target(target);
                    self.put(" = ");
                    self.expr(value);
                }
                self.put(" %}");
                self.body(&node.body);
                self.end("endwith");
            }
            Stmt::SetBlock(node) => {
                self.tag("set", node.span());
                self.target(&node.target);
                if let Some(filter) = &node.filter {
                    self.put(" | ");
                    self.expr(filter);
                }
                self.put(" %}");
                self.body(&node.body);
                self.end("endset");
            }
            Stmt::AutoEscape(node) => {
                self.tag("autoescape", node.span());
                self.expr(&node.enabled);
                self.put(" %}");
                self.body(&node.body);
                self.end("endautoescape");
            }
            Stmt::FilterBlock(node) => {
                self.tag("filter", node.span());
                self.expr(&node.filter);
                self.put(" %}");
                self.body(&node.body);
                self.end("endfilter");
            }
            Stmt::Macro(node) => {
                self.charge();
                self.tag("macro", node.span());
                self.put(node.name);
                self.parameters(node);
                self.put(" %}");
                self.body(&node.body);
                self.end("endmacro");
            }
            Stmt::CallBlock(node) => {
                self.charge();
                self.tag("call", node.span());
                self.parameters(&node.macro_decl);
                self.put(" ");
                self.call(&node.call);
                self.put(" %}");
                self.body(&node.macro_decl.body);
                self.end("endcall");
            }
            other => self.multi_template_statement(other),
        }
    }

    /// Statements that refer to other templates, which a tokenizer may have besides its default one.
    fn multi_template_statement(&mut self, statement: &ast::Stmt<'_>) {
        use ast::Stmt;
        match statement {
            Stmt::Block(node) => {
                self.tag("block", node.span());
                self.put(node.name);
                self.put(if node.required { " required %}" } else { " %}" });
                if !node.required {
                    self.body(&node.body);
                }
                self.end("endblock");
            }
            Stmt::Extends(node) => {
                self.tag("extends", node.span());
                self.expr(&node.name);
                self.put(" %}");
            }
            Stmt::Include(node) => {
                let start = self.tag("include", node.span());
                self.expr(&node.name);
                self.put(if node.ignore_missing { " ignore missing" } else { "" });
                self.record(start, node.span());
                self.put(" %}");
            }
            Stmt::Import(node) => {
                let start = self.tag("import", node.span());
                self.expr(&node.expr);
                self.put(" as ");
                self.target(&node.name);
                self.record(start, node.span());
                self.put(" %}");
            }
            Stmt::FromImport(node) => {
                let start = self.tag("from", node.span());
                self.expr(&node.expr);
                self.put(" import ");
                for (idx, (name, alias)) in node.names.iter().enumerate() {
                    self.put(if idx > 0 { ", " } else { "" });
                    self.target(name);
                    if let Some(alias) = alias {
                        self.put(" as ");
                        self.target(alias);
                    }
                }
                self.record(start, node.span());
                self.put(" %}");
            }
            _ => unreachable!("all other statements are handled above"),
        }
    }

    fn for_loop(&mut self, node: &ast::Spanned<ast::ForLoop<'_>>) {
        self.tag("for", node.span());
        self.target(&node.target);
        self.put(" in ");
        self.subject(&node.iter);
        self.filter(ITER);
        if let Some(condition) = &node.filter_expr {
            self.put(" if ");
            self.subject(condition);
        }
        self.put(if node.recursive { " recursive %}" } else { " %}" });
        self.body(&node.body);
        if !node.else_body.is_empty() {
            self.end("else");
            self.body(&node.else_body);
        }
        self.end("endfor");
    }

    /// The rest of an `if` or `elif` tag and what follows it, `endif` included.
    fn condition(&mut self, node: &ast::IfCond<'_>) {
        self.subject(&node.expr);
        self.put(" %}");
        self.body(&node.true_body);
        match &node.false_body[..] {
            [] => self.end("endif"),
            [ast::Stmt::IfCond(next)] => {
                self.tag("elif", next.span());
                self.condition(next);
            }
            statements => {
                self.end("else");
                self.body(statements);
                self.end("endif");
            }
        }
    }

    /// Counts a macro, which keeps the variables it captures until the rendering ends.
    fn charge(&mut self) {
        self.put("{{ ''");
        self.filter(CHARGE);
        self.put(" }}");
    }

    fn parameters(&mut self, node: &ast::Macro<'_>) {
        let without_default = node.args.len() - node.defaults.len();
        self.put("(");
        for (idx, arg) in node.args.iter().enumerate() {
            self.put(if idx > 0 { ", " } else { "" });
            self.target(arg);
            if let Some(default) = idx.checked_sub(without_default).and_then(|at| node.defaults.get(at)) {
                self.put("=");
                self.expr(default);
            }
        }
        self.put(")");
    }

    /// The target of an assignment: names, attributes, and lists of them.
    fn target(&mut self, target: &ast::Expr<'_>) {
        match target {
            ast::Expr::Var(var) => {
                self.line_of(var.span());
                self.put(var.id);
            }
            ast::Expr::GetAttr(attr) => {
                self.target(&attr.expr);
                self.put(".");
                self.put(attr.name);
            }
            ast::Expr::List(list) => {
                for (idx, item) in list.items.iter().enumerate() {
                    self.put(if idx > 0 { ", " } else { "" });
                    self.nested_target(item);
                }
                self.put(if list.items.len() == 1 { "," } else { "" });
            }
            // The engine reports targets that cannot be assigned to.
            other => self.expr(other),
        }
    }

    fn nested_target(&mut self, target: &ast::Expr<'_>) {
        let is_list = matches!(target, ast::Expr::List(_));
        self.put(if is_list { "(" } else { "" });
        self.target(target);
        self.put(if is_list { ")" } else { "" });
    }

    fn filter(&mut self, name: &str) {
        self.put("|");
        self.put(name);
    }

    /// The operand of a filter or a test, in parentheses if it binds less tightly.
    fn subject(&mut self, expr: &ast::Expr<'_>) {
        use ast::BinOpKind::{Add, Concat, Mul};
        let loose = match expr {
            ast::Expr::UnaryOp(_) | ast::Expr::Compare(_) | ast::Expr::IfExpr(_) | ast::Expr::Test(_) => true,
            ast::Expr::BinOp(node) => !matches!(node.op, Add | Concat | Mul),
            _ => false,
        };
        self.parenthesized(expr, loose);
    }

    /// The operand of an attribute, an index or a call, in parentheses unless it is a plain path.
    fn base(&mut self, expr: &ast::Expr<'_>) {
        let tight = matches!(expr, ast::Expr::Var(_) | ast::Expr::GetAttr(_) | ast::Expr::GetItem(_));
        self.parenthesized(expr, !tight);
    }

    fn parenthesized(&mut self, expr: &ast::Expr<'_>, parentheses: bool) {
        self.put(if parentheses { "(" } else { "" });
        self.expr(expr);
        self.put(if parentheses { ")" } else { "" });
    }

    /// Prints an expression; if it creates a value, through the filter that counts it.
    fn expr(&mut self, expr: &ast::Expr<'_>) {
        use ast::Expr::{Call, Filter, List, Map, Slice, Tuple};
        let (start, span) = (self.out.len(), expr.span());
        self.uncounted_expr(expr);
        self.record(start, span);
        if matches!(expr, Slice(_) | Filter(_) | Call(_) | List(_) | Tuple(_) | Map(_)) {
            self.filter(NEW);
            self.record(start, span);
        }
    }

    fn uncounted_expr(&mut self, expr: &ast::Expr<'_>) {
        use ast::Expr;
        let span = expr.span();
        match expr {
            Expr::Var(var) => {
                self.line_of(span);
                self.put(var.id);
            }
            Expr::Const(constant) => {
                self.line_of(span);
                self.literal(&constant.value);
            }
            Expr::Slice(node) => self.slice(node),
            Expr::UnaryOp(node) => self.unary(node),
            Expr::BinOp(node) => self.binary(node),
            Expr::Compare(node) => {
                self.subject(&node.expr);
                for next in &node.ops {
                    self.put(comparison(next.op));
                    self.subject(&next.expr);
                }
            }
            Expr::IfExpr(node) => {
                self.subject(&node.true_expr);
                self.put(" if ");
                self.subject(&node.test_expr);
                if let Some(other) = &node.false_expr {
                    self.put(" else ");
                    self.subject(other);
                }
            }
            Expr::Filter(node) => self.filter_expr(node, span),
            Expr::Test(node) => {
                self.subject(&node.expr);
                self.put(" is ");
                self.line_of(span);
                self.put(node.name);
                self.arguments(&node.args, false);
            }
            Expr::GetAttr(node) => {
                self.base(&node.expr);
                self.put(".");
                self.put(node.name);
            }
            Expr::GetItem(node) => {
                self.base(&node.expr);
                self.put("[");
                self.expr(&node.subscript_expr);
                self.put("]");
            }
            Expr::Call(node) => self.call(node),
            Expr::List(node) => {
                self.line_of(span);
                self.items("[", &node.items, "]");
            }
            Expr::Tuple(node) => {
                self.line_of(span);
                self.items("(", &node.items, if node.items.len() == 1 { ",)" } else { ")" });
            }
            Expr::Map(node) => {
                self.line_of(span);
                self.map(node);
            }
        }
    }

    fn slice(&mut self, node: &ast::Slice<'_>) {
        self.base(&node.expr);
        self.put("[");
        self.optional(node.start.as_ref());
        self.put(":");
        self.optional(node.stop.as_ref());
        self.put(":");
        self.optional(node.step.as_ref());
        self.put("]");
    }

    fn filter_expr(&mut self, node: &ast::Filter<'_>, span: Span) {
        if let Some(subject) = &node.expr {
            self.subject(subject);
            self.put("|");
        }
        self.line_of(span);
        let start = self.out.len();
        self.put(node.name);
        self.arguments(&node.args, false);
        self.record(start, span);
    }

    fn map(&mut self, node: &ast::Map<'_>) {
        self.put("{");
        for (idx, (key, value)) in node.keys.iter().zip(&node.values).enumerate() {
            self.put(if idx > 0 { ", " } else { "" });
            self.expr(key);
            self.put(": ");
            self.expr(value);
        }
        // A space before the brace: another brace may follow, and two would end the expression.
        self.put(" }");
    }

    fn unary(&mut self, node: &ast::UnaryOp<'_>) {
        let negates = |op: &ast::UnaryOpKind| matches!(op, ast::UnaryOpKind::Neg);
        self.put(if negates(&node.op) { "- " } else { "not " });
        match &node.expr {
            ast::Expr::UnaryOp(inner) if negates(&inner.op) == negates(&node.op) => self.expr(&node.expr),
            // A minus binds more tightly than a filter.
            expr if negates(&node.op) => self.base(expr),
            expr => self.subject(expr),
        }
    }

    fn binary(&mut self, node: &ast::Spanned<ast::BinOp<'_>>) {
        use ast::BinOpKind::*;
        let filter = match node.op {
            Add => ADD,
            Concat => CAT,
            Mul => MUL,
            op => {
                self.subject(&node.left);
                self.put(operator(op));
                return self.subject(&node.right);
            }
        };
        self.subject(&node.left);
        self.put("|");
        let start = self.out.len();
        self.put(filter);
        self.put("(");
        self.expr(&node.right);
        self.put(")");
        self.record(start, node.span());
    }

    /// A call of a name, a method or any other expression.
    fn call(&mut self, node: &ast::Spanned<ast::Call<'_>>) {
        let start = self.out.len();
        self.base(&node.expr);
        let recurses = matches!(&node.expr, ast::Expr::Var(var) if var.id == "loop");
        if node.args.is_empty() {
            self.put("()");
        }
        self.arguments(&node.args, recurses);
        self.record(start, node.span());
    }

    /// Arguments in parentheses, or nothing if there are none. `iterated`: the callee iterates over them.
    fn arguments(&mut self, args: &[ast::CallArg<'_>], iterated: bool) {
        if args.is_empty() {
            return;
        }
        self.put("(");
        for (idx, arg) in args.iter().enumerate() {
            self.put(if idx > 0 { ", " } else { "" });
            let (before, value, iterated) = match arg {
                ast::CallArg::Pos(value) => ("", value, iterated),
                ast::CallArg::Kwarg(name, value) => {
                    self.put(name);
                    ("=", value, false)
                }
                ast::CallArg::PosSplat(value) => ("*", value, true),
                ast::CallArg::KwargSplat(value) => ("**", value, false),
            };
            self.put(before);
            if iterated {
                self.subject(value);
                self.filter(ITER);
            } else {
                self.expr(value);
            }
        }
        self.put(")");
    }

    fn items(&mut self, open: &str, items: &[ast::Expr<'_>], close: &str) {
        self.put(open);
        for (idx, item) in items.iter().enumerate() {
            self.put(if idx > 0 { ", " } else { "" });
            self.expr(item);
        }
        self.put(close);
    }

    fn optional(&mut self, expr: Option<&ast::Expr<'_>>) {
        if let Some(expr) = expr {
            self.expr(expr);
        }
    }

    fn literal(&mut self, value: &minijinja::Value) {
        match value.kind() {
            ValueKind::String => self.quoted(value.as_str().unwrap_or_default()),
            ValueKind::Number if !value.is_integer() => {
                let float = f64::try_from(value.clone()).unwrap_or(f64::INFINITY);
                // The only literal for infinity.
                let text = if float.is_finite() { format!("{float:?}") } else { "1e999".into() };
                self.put(&text);
            }
            ValueKind::None => self.put("none"),
            _ => write!(self.out, "{value}").expect("writing to a String cannot fail"),
        }
    }

    fn quoted(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.put("\\\""),
                '\\' => self.put("\\\\"),
                '\n' => self.put("\\n"),
                '\r' => self.put("\\r"),
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn operator(op: ast::BinOpKind) -> &'static str {
    use ast::BinOpKind::*;
    match op {
        Eq => " == ",
        Ne => " != ",
        Lt => " < ",
        Lte => " <= ",
        Gt => " > ",
        Gte => " >= ",
        ScAnd => " and ",
        ScOr => " or ",
        Sub => " - ",
        Div => " / ",
        FloorDiv => " // ",
        Rem => " % ",
        Pow => " ** ",
        In => " in ",
        Add | Mul | Concat => unreachable!("printed as filters"),
    }
}

fn comparison(op: ast::CompareOpKind) -> &'static str {
    use ast::CompareOpKind::*;
    match op {
        Eq => " == ",
        Ne => " != ",
        Lt => " < ",
        Lte => " <= ",
        Gt => " > ",
        Gte => " >= ",
        In => " in ",
        NotIn => " not in ",
    }
}

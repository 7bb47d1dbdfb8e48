//! Parses text into a tree in which every node knows its position.
//!
//! A scalar keeps its text as written, without quotes: the key that reads it decides whether `no` is a word or a
//! boolean, and whether `1b` is a name or a number. JSON is a subset of
//! YAML, so the same parser reads both. The tree is built from parser events: serde would lose the text of plain
//! scalars and stop at the first repeated key.
//!
//! Not supported: several documents in one text, tags, and the merge key `<<`. Each is an error with its position.
//! Size, depth and the number of nodes, including copies by aliases, are bounded.

use granit_parser::{self, Event, Parser, ScalarStyle, Span, StrInput};

use crate::diagnose::{self, Mistake};

/// Larger texts are refused before they are parsed.
pub const MAX_TEXT_BYTES: usize = 1 << 20;
const MAX_DEPTH: usize = 32;
const MAX_NODES: usize = 10_000;

/// Which of the texts handed to `load` a node was read from. Later variants take precedence over earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Input {
    /// The default text of a key.
    Default,
    /// A default of the trainer that a launch line starts, such as `trl sft`.
    PeerDefault(&'static str),
    /// Index into the variables.
    Variable(usize),
    /// Index into the files.
    File(usize),
    /// Index into the flags of the launch line.
    Line(usize),
    /// Index into the overrides.
    Flag(usize),
}

impl Input {
    /// Inputs of the same level must agree with each other; a higher level replaces a lower one.
    pub(crate) fn level(self) -> usize {
        match self {
            Input::Default => 0,
            Input::PeerDefault(_) => 1,
            Input::Variable(_) => 2,
            Input::File(_) => 3,
            Input::Line(_) => 4,
            Input::Flag(_) => 5,
        }
    }

    /// The index of the file.
    pub(crate) fn file(self) -> Option<usize> {
        match self {
            Input::File(idx) => Some(idx),
            _ => None,
        }
    }
}

/// A position in a text. Lines and columns count from 1, columns and width in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) from: Input,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) width: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) at: At,
}

#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// `plain` is false for quoted and block scalars.
    Scalar {
        text: String,
        plain: bool,
    },
    Seq(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_at: At,
    pub(crate) node: Node,
}

/// An error in the text itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Flaw {
    /// The parser's message.
    Syntax(String),
    /// A syntax error whose cause is known.
    Mistake(String),
    Repeated {
        key: String,
        first: At,
    },
    TooLarge(&'static str),
    Unsupported(&'static str),
}

/// Parses `text`; an empty text has no tree. Repeated keys are collected, and the first one is kept. Every other error
/// ends the parsing.
pub(crate) fn parse(text: &str, from: Input) -> (Option<Node>, Vec<(Flaw, At)>) {
    let start = At { from, line: 1, column: 1, width: 1 };
    if text.len() > MAX_TEXT_BYTES {
        return (None, vec![(Flaw::TooLarge("the text is larger than 1 MiB"), start)]);
    }
    let options = granit_parser::options! {
        emit_comments: false,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    let mut builder = Builder {
        parser: Parser::new_from_str_with_options(text, options),
        from,
        at: start,
        num_nodes: 0,
        anchors: Vec::new(),
        flaws: Vec::new(),
    };
    match builder.document() {
        Ok(node) => (node, builder.flaws),
        Err(flaw) => {
            builder.flaws.push(explained(flaw, text));
            (None, builder.flaws)
        }
    }
}

/// Replaces a syntax error by the mistake that causes it, if that can be found.
fn explained((flaw, at): (Flaw, At), text: &str) -> (Flaw, At) {
    match (&flaw, diagnose::explain(text)) {
        (Flaw::Syntax(_), Some(Mistake { message, line, column })) => {
            (Flaw::Mistake(message), At { line, column, width: 1, ..at })
        }
        _ => (flaw, at),
    }
}

type Outcome<T> = Result<T, (Flaw, At)>;

struct Builder<'a> {
    parser: Parser<'a, StrInput<'a>>,
    from: Input,
    /// The position of the last event.
    at: At,
    num_nodes: usize,
    anchors: Vec<(usize, Node)>,
    flaws: Vec<(Flaw, At)>,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Outcome<Event<'a>> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => {
                self.at = self.place(&span);
                Ok(event)
            }
            Some(Err(error)) => {
                let marker = error.marker();
                let at = self.mark(marker.line(), marker.col(), 1);
                Err((Flaw::Syntax(error.info()), at))
            }
            None => Ok(Event::StreamEnd),
        }
    }

    fn place(&self, span: &Span) -> At {
        let width = if span.start.line() == span.end.line() { span.len() } else { 1 };
        self.mark(span.start.line(), span.start.col(), width)
    }

    fn mark(&self, line: usize, col: usize, width: usize) -> At {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        At { from: self.from, line: small(line.max(1)), column: small(col + 1), width: small(width.max(1)) }
    }

    fn document(&mut self) -> Outcome<Option<Node>> {
        let mut root = None;
        loop {
            match self.next()? {
                Event::StreamStart | Event::DocumentEnd => {}
                Event::StreamEnd => return Ok(root),
                Event::DocumentStart(..) if root.is_none() => {
                    let event = self.next()?;
                    root = Some(self.node(event, 0)?);
                }
                _ => return Err((Flaw::Unsupported("the text may contain only one document"), self.at)),
            }
        }
    }

    fn node(&mut self, event: Event<'a>, depth: usize) -> Outcome<Node> {
        let at = self.at;
        self.num_nodes += 1;
        if self.num_nodes > MAX_NODES {
            return Err((Flaw::TooLarge("the text has more than 10000 values"), at));
        }
        if depth > MAX_DEPTH {
            return Err((Flaw::TooLarge("the text is nested more than 32 levels deep"), at));
        }
        if event.tag().is_some() {
            return Err((Flaw::Unsupported("tags (`!name`) are not supported"), at));
        }
        let anchor = event.anchor_id();
        let value = match event {
            Event::Scalar(text, style, ..) => {
                Value::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain }
            }
            Event::SequenceStart(..) => Value::Seq(self.sequence(depth)?),
            Event::MappingStart(..) => Value::Map(self.mapping(depth)?),
            Event::Alias(id) => self.alias(id, depth)?,
            _ => return Err((Flaw::Syntax("a value was expected here".into()), at)),
        };
        let node = Node { value, at };
        if let Some(id) = anchor {
            self.anchors.push((id, node.clone()));
        }
        Ok(node)
    }

    fn sequence(&mut self, depth: usize) -> Outcome<Vec<Node>> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                Event::SequenceEnd => return Ok(items),
                event => items.push(self.node(event, depth + 1)?),
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Outcome<Vec<Entry>> {
        let mut entries: Vec<Entry> = Vec::new();
        loop {
            let event = self.next()?;
            let key_at = self.at;
            let key = match event {
                Event::MappingEnd => return Ok(entries),
                Event::Scalar(text, ..) => text.into_owned(),
                _ => return Err((Flaw::Unsupported("a key must be a plain word"), key_at)),
            };
            if key == "<<" {
                return Err((Flaw::Unsupported("the merge key `<<` is not supported"), key_at));
            }
            let event = self.next()?;
            let node = self.node(event, depth + 1)?;
            match entries.iter().find(|e| e.key == key) {
                Some(first) => self.flaws.push((Flaw::Repeated { key, first: first.key_at }, key_at)),
                None => entries.push(Entry { key, key_at, node }),
            }
        }
    }

    fn alias(&mut self, id: usize, depth: usize) -> Outcome<Value> {
        let Some((_, target)) = self.anchors.iter().find(|(anchor, _)| *anchor == id) else {
            return Err((Flaw::Unsupported("an alias cannot be part of the value that it names"), self.at));
        };
        let (num_nodes, height) = target.extent();
        self.num_nodes += num_nodes;
        if self.num_nodes > MAX_NODES || depth + height > MAX_DEPTH {
            return Err((Flaw::TooLarge("aliases make the text too large"), self.at));
        }
        Ok(target.value.clone())
    }
}

impl Node {
    /// Number of nodes and of levels below this one.
    fn extent(&self) -> (usize, usize) {
        let join = |(n, h): (usize, usize), child: &Node| {
            let (m, g) = child.extent();
            (n + m, h.max(g + 1))
        };
        match &self.value {
            Value::Scalar { .. } => (1, 0),
            Value::Seq(items) => items.iter().fold((1, 0), join),
            Value::Map(entries) => entries.iter().map(|e| &e.node).fold((1, 0), join),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(text: &str) -> Node {
        let (node, flaws) = parse(text, Input::File(0));
        assert_eq!(flaws, []);
        node.unwrap()
    }

    /// For each entry `key line:column, value line:column+width`.
    fn entries(node: &Node) -> Vec<String> {
        let Value::Map(entries) = &node.value else { panic!("not a map: {node:?}") };
        let described = |e: &Entry| {
            let (k, v) = (e.key_at, e.node.at);
            format!("{} {}:{}, {}:{}+{}", e.key, k.line, k.column, v.line, v.column, v.width)
        };
        entries.iter().map(described).collect()
    }

    #[test]
    fn nodes_know_their_place() {
        let node = root("# a comment\nseed: 42\ntraining:\n  \"x\": 'ab'\n  läng: 1\n");
        assert_eq!(entries(&node), ["seed 2:1, 2:7+2", "training 3:1, 4:3+1"]);
        let Value::Map(top) = &node.value else { unreachable!() };
        assert_eq!(entries(&top[1].node), ["x 4:3, 4:8+4", "läng 5:3, 5:9+1"]);
    }

    #[test]
    fn json_is_read_by_the_same_reader() {
        let node = root("{\n\t\"seed\": 42,\n\t\"train_files\": [\"a\", \"b\\/c\"]\n}\n");
        assert_eq!(entries(&node), ["seed 2:2, 2:10+2", "train_files 3:2, 3:17+1"]);
    }

    #[test]
    fn plain_text_is_kept_as_written() {
        let node = root("a: no\nb: 1e-5\nc: 'no'\nd:\n");
        let Value::Map(entries) = node.value else { unreachable!() };
        let texts: Vec<_> = entries.iter().map(|e| format!("{:?}", e.node.value)).collect();
        assert_eq!(texts[0], r#"Scalar { text: "no", plain: true }"#);
        assert_eq!(texts[1], r#"Scalar { text: "1e-5", plain: true }"#);
        assert_eq!(texts[2], r#"Scalar { text: "no", plain: false }"#);
        assert!(texts[3].contains("plain: true"), "{}", texts[3]);
    }

    #[test]
    fn bombs_are_refused() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for i in 1..9 {
            let before = format!("*a{}", i - 1);
            let row = [before.as_str(); 10].join(", ");
            text.push_str(&format!("a{i}: &a{i} [{row}]\n"));
        }
        assert!(matches!(parse(&text, Input::File(0)).1[..], [(Flaw::TooLarge(_), _)]));
        let deep = "[".repeat(5000);
        assert_eq!(parse(&deep, Input::File(0)).1.len(), 1);
        let long = "a".repeat(MAX_TEXT_BYTES + 1);
        assert!(matches!(parse(&long, Input::File(0)).1[..], [(Flaw::TooLarge(_), _)]));
    }

    #[test]
    fn every_repeated_key_is_reported() {
        let (node, flaws) = parse("a: 1\nb: 2\na: 3\nb: 4\n", Input::File(0));
        assert!(node.is_some());
        assert_eq!(flaws.len(), 2);
    }

    #[test]
    fn what_is_left_out_is_refused() {
        for text in ["a: 1\n---\nb: 2\n", "a: !x 1\n", "a: &a {b: 1}\nc: {<<: *a}\n", "? [a]\n: 1\n"] {
            assert!(matches!(parse(text, Input::File(0)).1[..], [(Flaw::Unsupported(_), _)]), "{text}");
        }
        assert!(parse("", Input::File(0)).0.is_none());
        assert!(parse("# nothing\n", Input::File(0)).0.is_none());
    }
}

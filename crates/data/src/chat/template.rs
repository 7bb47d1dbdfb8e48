//! A compiled chat template.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::value::Value as Engine;
use minijinja::{Environment, Error, ErrorKind};

use crate::{DataError, Tokenizer};

use super::lower::Lowered;
use super::messages::Ready;
use super::source::{DEFAULT, Named, TemplateSource, find};
use super::tags::{self, Marks, Rewritten};
use super::{Chat, ChatFault, Moment, TemplateFault, python, turns};

/// The template that conversations with tools prefer, where there are several.
const TOOL_USE: &str = "tool_use";

/// Code that is longer is not shown in messages, in bytes.
const SHOWN_CODE: usize = 80;

/// Part of every fingerprint; raised when the same template and row come to other text.
const RENDERER_VERSION: u64 = 2;

/// What turns conversations into text, compiled once; shared between threads as it is.
pub struct ChatTemplate {
    env: Environment<'static>,
    templates: Vec<Compiled>,
    /// `bos_token` and its like.
    specials: Vec<(String, Engine)>,
    fingerprint: String,
    /// The text of the template that a model folder gets, if it is not the tokenizer's own.
    given: Option<String>,
}

struct Compiled {
    name: String,
    origin: String,
    /// Whether it has generation blocks.
    tagged: bool,
    /// Whether the line break before a turn is learnt.
    learns_break: bool,
    /// Its text with generation tags renamed, and what the engine has of it.
    source: String,
    lowered: Option<Lowered>,
}

/// Templates without generation blocks for which TRL has a variant that puts them around the line break before a
/// turn's content too, by the hash of their text: Qwen2.5's. Elsewhere what the prompt for a turn gives is never
/// part of it.
const LEARN_BREAK: [&str; 1] = ["72e8302eb275e75b189b6a9ebfaa7aaba1b868c610b169b3b16c5cae2172148e"];

impl ChatTemplate {
    /// The template of `source`, with the special tokens of `tokenizer` as variables. `now` is what
    /// `strftime_now` prints.
    pub fn load(source: &TemplateSource, tokenizer: &Tokenizer, now: Moment) -> Result<Self, DataError> {
        let found = find(source, tokenizer)?;
        let mut env = python::environment(now);
        let mut templates = Vec::with_capacity(found.len());
        for template in &found {
            templates.push(compile(&mut env, template).map_err(DataError::ChatTemplate)?);
        }
        let given = match source {
            TemplateSource::Tokenizer => None,
            _ => found.iter().find(|template| template.name == DEFAULT).map(|template| template.text.clone()),
        };
        let specials = tokenizer.special_tokens();
        Ok(ChatTemplate {
            env,
            templates,
            fingerprint: fingerprint(&found, specials, now),
            specials: specials.iter().map(|(name, token)| (name.clone(), token.as_str().into())).collect(),
            given,
        })
    }

    /// The conversation as text, and with `add_generation_prompt` what comes before an answer.
    pub fn render(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, ChatFault> {
        self.text(&Ready::new(chat)?, add_generation_prompt)
    }

    /// The text that a model continues with its answer.
    pub fn prompt(&self, chat: &Chat) -> Result<String, ChatFault> {
        self.render(chat, true)
    }

    /// BLAKE3, in hex, of everything but the row that rendered text depends on.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The `chat_template.jinja` of a model folder; `None` if the tokenizer's files have it already.
    pub fn file(&self) -> Option<&str> {
        self.given.as_deref()
    }

    /// The conversation as text, and the byte ranges of it that are the assistant's.
    pub(crate) fn text_and_spans(&self, chat: &Ready) -> Result<(String, Vec<Range<usize>>), ChatFault> {
        let text = self.text(chat, false)?;
        let template = self.choose(chat)?;
        if !template.tagged {
            let mut spans = turns::spans(self, chat, &text)?;
            for span in spans.iter_mut().filter(|_| template.learns_break) {
                span.start -= usize::from(text[..span.start].ends_with('\n'));
            }
            return Ok((text, spans));
        }
        // Text that has no marks with marks in it can be told from marks.
        let marks = Marks::outside(|c| text.contains(c));
        let marked = self.run(template, chat, false, marks)?;
        let (unmarked, spans) = marks.map_or_else(Default::default, |marks| marks.cut(&marked));
        if unmarked != text {
            let why = "its generation blocks are in text that it changes afterwards";
            return Err(template.fault(None, why.into()).into());
        }
        Ok((text, spans))
    }

    pub(crate) fn text(&self, chat: &Ready, add_generation_prompt: bool) -> Result<String, ChatFault> {
        Ok(self.run(self.choose(chat)?, chat, add_generation_prompt, None)?)
    }

    pub(crate) fn origin(&self, chat: &Ready) -> String {
        self.choose(chat).map(|template| template.origin.clone()).unwrap_or_default()
    }

    fn choose(&self, chat: &Ready) -> Result<&Compiled, TemplateFault> {
        let named = |name: &str| self.templates.iter().find(|template| template.name == name);
        let special = if chat.has_tools() { named(TOOL_USE) } else { None };
        special.or_else(|| named(DEFAULT)).ok_or_else(|| {
            let names: Vec<&str> = self.templates.iter().map(|template| template.name.as_str()).collect();
            let why = format!("none of them is called `{DEFAULT}`; there are {}", names.join(", "));
            self.templates[0].fault(None, why)
        })
    }

    fn run(
        &self,
        template: &Compiled,
        chat: &Ready,
        add_generation_prompt: bool,
        marks: Option<Marks>,
    ) -> Result<String, TemplateFault> {
        let own = [
            ("messages", chat.messages.iter().cloned().collect()),
            ("tools", chat.tools.clone()),
            ("add_generation_prompt", add_generation_prompt.into()),
            (tags::VARIABLE, marks.map(Marks::text).unwrap_or_default().into()),
        ];
        // Later ones win: a row may replace a special token, as with the peers.
        let variables = std::iter::once(("documents", Engine::from(())))
            .chain(self.specials.iter().map(|(name, value)| (name.as_str(), value.clone())))
            .chain(chat.kwargs.iter().map(|(name, value)| (name.as_str(), value.clone())))
            .chain(own);
        let variables = Engine::from_pairs(variables);
        let compiled = self.env.get_template(&template.name).map_err(|e| template.blame(&e))?;
        // The engine panics on some slices (`''[::-1]`); a stranger's template must not end a run. What is
        // rendered into is dropped with the panic, and the engine itself keeps nothing.
        let rendered = catch_unwind(AssertUnwindSafe(|| compiled.render(variables)));
        match rendered {
            Ok(rendered) => rendered.map_err(|e| template.blame(&e)),
            Err(_) => Err(template.fault(None, "the template engine failed on it".into())),
        }
    }
}

fn compile(env: &mut Environment<'static>, named: &Named) -> Result<Compiled, TemplateFault> {
    let learns_break = LEARN_BREAK.contains(&blake3::hash(named.text.as_bytes()).to_hex().as_str());
    let (name, origin) = (named.name.clone(), named.origin.clone());
    let mut template =
        Compiled { name, origin, tagged: false, learns_break, source: String::new(), lowered: None };
    let Rewritten { source, tagged } =
        tags::rewrite(&named.text).map_err(|(line, why)| template.fault(Some(line), why.into()))?;
    template.tagged = tagged;
    let lowered = Lowered::new(&source, &named.name, python::syntax()).map_err(|e| template.blame(&e))?;
    let compiled = env.add_template_owned(named.name.clone(), lowered.source.clone());
    compiled.map_err(|e| template.blame(&e))?;
    (template.source, template.lowered) = (source, Some(lowered));
    Ok(template)
}

impl Compiled {
    fn fault(&self, line: Option<usize>, why: String) -> TemplateFault {
        TemplateFault { origin: self.origin.clone(), line, why, raised: false }
    }

    /// The fault that `error` is, with the part of the template that failed.
    fn blame(&self, error: &Error) -> TemplateFault {
        let detail = error.detail().unwrap_or_default();
        if let Some(said) = detail.strip_prefix(python::RAISED) {
            return TemplateFault { raised: true, ..self.fault(error.line(), said.into()) };
        }
        let place = error.range().and_then(|range| self.lowered.as_ref()?.original(range));
        let code = place.and_then(|place| self.source.get(place)).filter(|code| {
            !code.is_empty()
                && code.len() <= SHOWN_CODE
                && !code.contains(['\n', '`'])
                && !code.contains(tags::FILTER)
        });
        let at = code.map(|code| format!(" in `{code}`")).unwrap_or_default();
        let why = match error.kind() {
            ErrorKind::OutOfFuel => {
                format!("stopped after {} instructions; does a loop never end?", python::FUEL)
            }
            kind if detail.is_empty() => format!("{kind}{at}"),
            kind => format!("{kind}: {detail}{at}"),
        };
        self.fault(error.line(), why)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origins: Vec<&str> = self.templates.iter().map(|template| template.origin.as_str()).collect();
        f.debug_struct("ChatTemplate").field("origins", &origins).finish_non_exhaustive()
    }
}

fn fingerprint(templates: &[Named], specials: &[(String, String)], now: Moment) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(&RENDERER_VERSION.to_le_bytes());
    for template in templates {
        add(template.name.as_bytes());
        add(template.text.as_bytes());
    }
    for (name, token) in specials {
        add(name.as_bytes());
        add(token.as_bytes());
    }
    if templates.iter().any(|template| template.text.contains("strftime_now")) {
        add(format!("{now:?}").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

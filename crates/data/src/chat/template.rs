//! A compiled chat template.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::value::Value as Engine;
use minijinja::{Environment, Error, ErrorKind};

use crate::{DataError, Tokenizer};

use super::lower::LoweredTemplate;
use super::messages::RenderInput;
use super::source::{DEFAULT, NamedTemplate, TemplateSource, find};
use super::tags::{self, RewrittenTemplate, SpanMarkers};
use super::{Chat, ChatFault, DateTime, TemplateFault, python, turns};

/// The template for conversations with tools, if there is one of this name.
const TOOL_USE: &str = "tool_use";

/// The longest piece of a template's code that messages quote.
const MAX_SHOWN_CODE_BYTES: usize = 80;

/// Part of every fingerprint. Increase it when the same template and row render to different text.
const RENDERER_VERSION: u64 = 2;

/// A compiled chat template, which can be shared between threads.
pub struct ChatTemplate {
    env: Environment<'static>,
    templates: Vec<CompiledTemplate>,
    /// Special tokens such as `bos_token`.
    specials: Vec<(String, Engine)>,
    fingerprint: String,
    /// The template's text, if it does not come from the tokenizer's files and must be written to the model folder.
    custom_text: Option<String>,
}

struct CompiledTemplate {
    name: String,
    origin: String,
    /// Whether the template has generation blocks.
    tagged: bool,
    /// Whether the newline before a turn counts in the loss; see [`NEWLINE_SUPERVISED`].
    newline_supervised: bool,
    /// The source with rewritten generation tags, and what the engine compiles.
    source: String,
    lowered: Option<LoweredTemplate>,
}

/// Templates, by the hash of their text, whose assistant turns include the newline before the content: Qwen2.5's. The
/// template has no generation blocks, and TRL's training variant of it puts that newline inside the block. For all
/// other templates, text that is part of the generation prompt is never part of the turn.
const NEWLINE_SUPERVISED: [&str; 1] = ["72e8302eb275e75b189b6a9ebfaa7aaba1b868c610b169b3b16c5cae2172148e"];

impl ChatTemplate {
    /// Loads the template of `source`, with the special tokens of `tokenizer` as variables. `strftime_now` prints
    /// `now`.
    pub fn load(source: &TemplateSource, tokenizer: &Tokenizer, now: DateTime) -> Result<Self, DataError> {
        let found = find(source, tokenizer)?;
        let mut env = python::environment(now);
        let mut templates = Vec::with_capacity(found.len());
        for template in &found {
            templates.push(compile(&mut env, template).map_err(DataError::ChatTemplate)?);
        }
        let custom_text = match source {
            TemplateSource::Tokenizer => None,
            _ => found.iter().find(|template| template.name == DEFAULT).map(|template| template.text.clone()),
        };
        let specials = tokenizer.special_tokens();
        Ok(ChatTemplate {
            env,
            templates,
            fingerprint: fingerprint(&found, specials, now),
            specials: specials.iter().map(|(name, token)| (name.clone(), token.as_str().into())).collect(),
            custom_text,
        })
    }

    /// Renders a conversation, with the generation prompt if `add_generation_prompt` is set.
    pub fn render(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, ChatFault> {
        self.text(&RenderInput::new(chat)?, add_generation_prompt)
    }

    /// Renders a conversation with the generation prompt: the text that the model continues.
    pub fn prompt(&self, chat: &Chat) -> Result<String, ChatFault> {
        self.render(chat, true)
    }

    /// BLAKE3, in hex, of everything besides the row that the rendered text depends on.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The `chat_template.jinja` to write to a model folder; `None` if the tokenizer's files already contain it.
    pub fn file(&self) -> Option<&str> {
        self.custom_text.as_deref()
    }

    /// Renders a conversation, and returns the byte ranges of the assistant's turns.
    pub(crate) fn text_and_spans(
        &self,
        chat: &RenderInput,
    ) -> Result<(String, Vec<Range<usize>>), ChatFault> {
        let text = self.text(chat, false)?;
        let template = self.choose(chat)?;
        if !template.tagged {
            let mut spans = turns::spans(self, chat, &text)?;
            for span in spans.iter_mut().filter(|_| template.newline_supervised) {
                span.start -= usize::from(text[..span.start].ends_with('\n'));
            }
            return Ok((text, spans));
        }
        // Render a second time with markers: characters that do not occur in the plain text.
        let markers = SpanMarkers::outside(|c| text.contains(c));
        let marked = self.run(template, chat, false, markers)?;
        let (unmarked, spans) = markers.map_or_else(Default::default, |markers| markers.remove(&marked));
        if unmarked != text {
            let why = "the template modifies the output of its generation blocks";
            return Err(template.fault(None, why.into()).into());
        }
        Ok((text, spans))
    }

    pub(crate) fn text(&self, chat: &RenderInput, add_generation_prompt: bool) -> Result<String, ChatFault> {
        Ok(self.run(self.choose(chat)?, chat, add_generation_prompt, None)?)
    }

    pub(crate) fn origin(&self, chat: &RenderInput) -> String {
        self.choose(chat).map(|template| template.origin.clone()).unwrap_or_default()
    }

    fn choose(&self, chat: &RenderInput) -> Result<&CompiledTemplate, TemplateFault> {
        let named = |name: &str| self.templates.iter().find(|template| template.name == name);
        let special = if chat.has_tools() { named(TOOL_USE) } else { None };
        special.or_else(|| named(DEFAULT)).ok_or_else(|| {
            let names: Vec<&str> = self.templates.iter().map(|template| template.name.as_str()).collect();
            let why = format!("there is no template named `{DEFAULT}`; found {}", names.join(", "));
            self.templates[0].fault(None, why)
        })
    }

    fn run(
        &self,
        template: &CompiledTemplate,
        chat: &RenderInput,
        add_generation_prompt: bool,
        markers: Option<SpanMarkers>,
    ) -> Result<String, TemplateFault> {
        let own = [
            ("messages", chat.messages.iter().cloned().collect()),
            ("tools", chat.tools.clone()),
            ("add_generation_prompt", add_generation_prompt.into()),
            (tags::VARIABLE, markers.map(SpanMarkers::text).unwrap_or_default().into()),
        ];
        // Later entries win: a row may replace a special token, as in transformers.
        let variables = std::iter::once(("documents", Engine::from(())))
            .chain(self.specials.iter().map(|(name, value)| (name.as_str(), value.clone())))
            .chain(chat.kwargs.iter().map(|(name, value)| (name.as_str(), value.clone())))
            .chain(own);
        let variables = Engine::from_pairs(variables);
        let compiled = self.env.get_template(&template.name).map_err(|e| template.fault_of(&e))?;
        // The engine panics on some slices (`''[::-1]`), and an untrusted template must not crash a run. Unwinding
        // is safe: the output is dropped with the panic, and the engine keeps no state.
        let rendered = catch_unwind(AssertUnwindSafe(|| compiled.render(variables)));
        match rendered {
            Ok(rendered) => rendered.map_err(|e| template.fault_of(&e)),
            Err(_) => Err(template.fault(None, "the template engine crashed while rendering".into())),
        }
    }
}

fn compile(env: &mut Environment<'static>, named: &NamedTemplate) -> Result<CompiledTemplate, TemplateFault> {
    let text_hash = blake3::hash(named.text.as_bytes()).to_hex();
    let newline_supervised = NEWLINE_SUPERVISED.contains(&text_hash.as_str());
    let (name, origin) = (named.name.clone(), named.origin.clone());
    let mut template = CompiledTemplate {
        name,
        origin,
        tagged: false,
        newline_supervised,
        source: String::new(),
        lowered: None,
    };
    let RewrittenTemplate { source, tagged } =
        tags::rewrite(&named.text).map_err(|(line, why)| template.fault(Some(line), why.into()))?;
    template.tagged = tagged;
    let lowered =
        LoweredTemplate::new(&source, &named.name, python::syntax()).map_err(|e| template.fault_of(&e))?;
    let compiled = env.add_template_owned(named.name.clone(), lowered.source.clone());
    compiled.map_err(|e| template.fault_of(&e))?;
    (template.source, template.lowered) = (source, Some(lowered));
    Ok(template)
}

impl CompiledTemplate {
    fn fault(&self, line: Option<usize>, why: String) -> TemplateFault {
        TemplateFault { origin: self.origin.clone(), line, why, raised: false }
    }

    /// Converts an engine error to a fault that quotes the code that failed.
    fn fault_of(&self, error: &Error) -> TemplateFault {
        let detail = error.detail().unwrap_or_default();
        if let Some(message) = detail.strip_prefix(python::RAISED) {
            return TemplateFault { raised: true, ..self.fault(error.line(), message.into()) };
        }
        let range = error.range().and_then(|range| self.lowered.as_ref()?.original(range));
        let code = range.and_then(|range| self.source.get(range)).filter(|code| {
            !code.is_empty()
                && code.len() <= MAX_SHOWN_CODE_BYTES
                && !code.contains(['\n', '`'])
                && !code.contains(tags::FILTER)
        });
        let at = code.map(|code| format!(" in `{code}`")).unwrap_or_default();
        let why = match error.kind() {
            ErrorKind::OutOfFuel => {
                format!("stopped after {} instructions; is there an endless loop?", python::FUEL)
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

fn fingerprint(templates: &[NamedTemplate], specials: &[(String, String)], now: DateTime) -> String {
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

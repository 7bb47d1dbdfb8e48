//! Conversations: from messages to text, through the template that a model was trained with, and from
//! text to tokens and to which of them are learnt.
//!
//! [`ChatTemplate`] renders, [`encode`] and [`encode_pair`] make tokens and masks. Which tokens are the
//! assistant's is what the template's `{% generation %}` blocks say; without such blocks it is found
//! out by rendering the conversation with other words in it (`turns`). Everything is a pure function of
//! the template, the tokenizer and the row: the date, if a template prints one, is given.
//!
//! Left out: content that is not text (images are what a template makes of them), continuing a final
//! message, and the training variants of known templates that TRL swaps in; where those begin a turn earlier,
//! so is it begun here (`LEARN_BREAK`).

mod bounds;
mod clock;
mod encode;
mod fault;
mod lower;
mod messages;
mod python;
mod repr;
mod rows;
mod source;
mod tags;
mod template;
mod turns;

use serde_json::{Map, Value};

pub use clock::Moment;
pub use encode::{Encoded, Masks, encode, encode_pair};
pub use fault::{ChatFault, TemplateFault};
pub use rows::ChatRows;
pub use source::TemplateSource;
pub(crate) use source::additional;
pub use template::ChatTemplate;

/// One conversation as a row holds it. Messages are kept as they are written: a template may read any
/// field of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Objects with at least a `role`.
    pub messages: Vec<Value>,
    /// The row's `tools`, a list, or a string with a list in JSON.
    pub tools: Option<Value>,
    /// The row's `chat_template_kwargs`: further variables of the template.
    pub kwargs: Map<String, Value>,
}

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn parse_with(text: &str, template: bool) -> Result<(Format, Row), RowFault> {
    super::parse(Body::Json(text.as_bytes().to_vec()), &Columns::default(), DataTask::Sft, template)
}

fn parse(text: &str) -> Result<Row, RowFault> {
    parse_with(text, false).map(|(_, row)| row)
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

#[test]
fn columns_determine_the_format() {
    assert_eq!(parse(r#"{"id": 3, "text": "a"}"#), Ok(Row::Text("a".into())));
    let pair = Row::Pair { prompt: "p".into(), completion: "c".into() };
    assert_eq!(parse(r#"{"prompt": "p", "completion": "c", "text": "t"}"#), Ok(pair));
    assert_eq!(parse(r#"{"prompt": "p", "text": "t"}"#), Ok(Row::Text("t".into())));
    let format = |text: &str| parse_with(text, false).unwrap().0;
    assert_eq!(format(r#"{"messages": [{"role": "user"}], "prompt": "x", "text": "t"}"#), Format::Messages);
    assert_eq!(format(r#"{"instruction": "i", "output": "o", "text": "t"}"#), Format::Text);
    assert_eq!(format(r#"{"input_ids": [1], "text": "t"}"#), Format::Tokens);
}

#[test]
fn conversations_keep_all_fields_of_messages() {
    let row = parse(
        r#"{"messages": [{"role": "user", "content": "hi", "name": "n"}], "tools": "[{\"name\": \"f\"}]",
            "chat_template_kwargs": {"thinking": true}, "id": 1}"#,
    );
    let Ok(Row::Chat(chat)) = row else { panic!("{row:?}") };
    assert_eq!(chat.messages, [json!({ "role": "user", "content": "hi", "name": "n" })]);
    assert_eq!(chat.tools, Some(json!([{ "name": "f" }])));
    assert_eq!(chat.kwargs["thinking"], true);
    let row = parse(
        r#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant"}], "tools": []}"#,
    );
    let prompt = Chat { messages: vec![message("user", "q")], ..Chat::default() };
    assert_eq!(row, Ok(Row::ChatPair { prompt, completion: vec![json!({ "role": "assistant" })] }));
}

#[test]
fn sharegpt_tags_become_roles() {
    let row = parse(
        r#"{"system": "be brief", "conversations": [{"from": "human", "value": "a"},
            {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
            {"from": "observation", "value": "1"}, {"from": "gpt", "value": "b"},
            {"role": "user", "content": "c"}, {"from": "function_call", "value": "not a call"}]}"#,
    );
    let Ok(Row::Chat(chat)) = row else { panic!("{row:?}") };
    let call = json!({ "type": "function", "function": { "name": "f", "arguments": {} } });
    let expected = [
        message("system", "be brief"),
        message("user", "a"),
        json!({ "role": "assistant", "content": "", "tool_calls": [call] }),
        message("tool", "1"),
        message("assistant", "b"),
        message("user", "c"),
        message("assistant", "not a call"),
    ];
    assert_eq!(chat.messages, expected);
    let unknown = parse(r#"{"conversations": [{"from": "alien", "value": "b"}]}"#);
    assert_eq!(unknown, Err(RowFault::UnknownTag { number: 1, tag: "alien".into() }));
}

#[test]
fn alpaca_is_text_without_a_template_and_a_conversation_with_one() {
    let text =
        r#"{"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]], "system": null}"#;
    let Ok(Row::Pair { prompt, completion }) = parse(text) else { panic!() };
    assert_eq!(completion, "3");
    let expected = "Below is an instruction that describes a task, paired with an input that provides further \
                    context. Write a response that appropriately completes the request.\n\n### Instruction:\na\n\n\
                    ### Response:\nb\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n";
    assert_eq!(prompt, expected);
    let (format, row) = parse_with(text, true).unwrap();
    let messages = vec![message("user", "a"), message("assistant", "b"), message("user", "Add.\n1 2")];
    let prompt = Chat { messages, ..Chat::default() };
    assert_eq!(
        (format, row),
        (Format::Alpaca, Row::ChatPair { prompt, completion: vec![message("assistant", "3")] })
    );
    let Ok(Row::Pair { prompt, .. }) =
        parse(r#"{"instruction": "Go.", "input": "", "output": "", "system": "S"}"#)
    else {
        panic!()
    };
    assert_eq!(prompt, "S\n\n### Instruction:\nGo.\n\n### Response:\n");
    let Ok(Row::Pair { prompt, .. }) = parse(r#"{"instruction": "Go.", "output": "x"}"#) else { panic!() };
    assert!(
        prompt.starts_with("Below is an instruction that describes a task. Write a response"),
        "{prompt}"
    );
}

#[test]
fn token_ids_are_used_unchanged() {
    let tokens = |text: &str| match parse(text) {
        Ok(Row::Tokens { ids, supervised }) => Ok((ids, supervised)),
        Err(fault) => Err(fault.to_string()),
        Ok(other) => panic!("{other:?}"),
    };
    assert_eq!(tokens(r#"{"input_ids": [1, 2]}"#), Ok((vec![1, 2], None)));
    assert_eq!(
        tokens(r#"{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "completion_mask": [1, 1, 0]}"#),
        Ok((vec![1, 2, 3], Some(vec![false, true, false])))
    );
    assert_eq!(
        tokens(r#"{"input_ids": [1, 2], "assistant_masks": [0, 1], "labels": null}"#),
        Ok((vec![1, 2], Some(vec![false, true])))
    );
    for (text, expected) in [
        (r#"{"input_ids": [1, -2]}"#, "`input_ids` is a number, expected a list of token ids\n  -2"),
        (r#"{"input_ids": [1, 2], "labels": [1]}"#, "`labels` has 1 entries, but `input_ids` has 2"),
        (
            r#"{"input_ids": [1, 2], "labels": [-100, 7]}"#,
            "`labels` has 7 at index 1, but `input_ids` has 2 there",
        ),
        (
            r#"{"input_ids": [1], "completion_mask": [2]}"#,
            "`completion_mask` is a number, expected a list of 0 and 1\n  2",
        ),
    ] {
        assert_eq!(tokens(text), Err(expected.to_string()));
    }
}

#[test]
fn deep_nesting_is_an_error() {
    for text in [format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000)), "{\"a\":".repeat(100_000)] {
        assert!(matches!(parse(&text), Err(RowFault::Json { .. })));
    }
}

proptest! {
    #[test]
    fn any_bytes_parse_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = super::parse(Body::Json(bytes), &Columns::default(), DataTask::Sft, false);
    }

    #[test]
    fn any_text_is_kept_unchanged(text in any::<String>()) {
        let line = json!({ "text": text }).to_string();
        prop_assert_eq!(parse(&line), Ok(Row::Text(text)));
    }
}

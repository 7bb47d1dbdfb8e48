use super::*;
use proptest::prelude::*;
use serde_json::json;

const COMPLETION: PreferenceLayout = PreferenceLayout::Completion;
const SEQUENCE: PreferenceLayout = PreferenceLayout::Sequence;

fn parse(row: Value, layout: PreferenceLayout) -> Result<(Format, PreferenceRow), RowFault> {
    let Value::Object(mut columns) = row else { panic!("{row}") };
    super::parse(&mut columns, layout)
}

fn text(row: Value, layout: PreferenceLayout) -> [String; 3] {
    match parse(row, layout).unwrap().1.sides {
        PreferenceSides::Text { prompt, chosen, rejected } => [prompt, chosen, rejected],
        other => panic!("{other:?}"),
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

#[test]
fn an_implicit_prompt_is_the_longest_common_prefix() {
    for (chosen, rejected, expected) in [
        // A space before the difference belongs to the completions.
        ("The sky is blue.", "The sky is green.", ["The sky is", " blue.", " green."]),
        ("word", "work", ["wor", "d", "k"]),
        ("naïve 水x", "naïve 水y", ["naïve 水", "x", "y"]),
        // Neither completion is empty.
        ("same", "same", ["sam", "e", "e"]),
        ("a b ", "a b c", ["a b", " ", " c"]),
        ("a", "ab", ["", "a", "ab"]),
        ("", "x", ["", "", "x"]),
        // TRL takes the end of the text here: its index before the first character is -1.
        ("x ", "y", ["", "x ", "y"]),
        (" x", " y", ["", " x", " y"]),
    ] {
        let row = json!({ "chosen": chosen, "rejected": rejected });
        assert_eq!(text(row.clone(), COMPLETION), expected);
        assert_eq!(text(row, SEQUENCE), ["", chosen, rejected]);
    }
}

#[test]
fn an_implicit_prompt_of_messages_is_the_list_of_common_messages() {
    let (u, a, b) = (message("user", "q"), message("assistant", "a"), message("assistant", "b"));
    let row = json!({ "chosen": [u, a], "rejected": [u, b], "tools": [{"name": "f"}] });
    let (format, row) = parse(row, COMPLETION).unwrap();
    let prompt = Chat { messages: vec![u.clone()], tools: Some(json!([{ "name": "f" }])), ..Chat::default() };
    assert_eq!(format, Format::ImplicitMessagePreference);
    let (chosen, rejected) = (vec![a.clone()], vec![b.clone()]);
    assert_eq!(row.sides, PreferenceSides::Chat { prompt, chosen, rejected });
    // Fields in another order are the same message; one list may continue the other.
    let reordered = json!({ "content": "q", "role": "user" });
    let row = json!({ "chosen": [u, a], "rejected": [reordered, a, b] });
    let PreferenceSides::Chat { prompt, chosen, rejected } = parse(row, COMPLETION).unwrap().1.sides else {
        panic!()
    };
    assert_eq!((prompt.messages.len(), chosen.len(), rejected.len()), (1, 1, 2));
    let different = json!({ "chosen": [a], "rejected": [b] });
    assert_eq!(parse(different.clone(), COMPLETION), Err(RowFault::NoCommonPrompt));
    let PreferenceSides::Chat { prompt, chosen, .. } = parse(different, SEQUENCE).unwrap().1.sides else {
        panic!()
    };
    assert_eq!((prompt.messages.len(), chosen), (0, vec![a.clone()]));
    // The text of the prompt beside whole conversations is not part of them.
    let row = json!({ "prompt": "q", "chosen": [u, a], "rejected": [u, b] });
    assert_eq!(parse(row, COMPLETION).unwrap().0, Format::ImplicitMessagePreference);
    let row = json!({ "prompt": [u], "chosen": [a], "rejected": [b] });
    assert_eq!(parse(row, COMPLETION).unwrap().0, Format::MessagePreference);
}

#[test]
fn a_margin_is_a_finite_number() {
    let with = |margin: Value| {
        let row = json!({ "prompt": "p", "chosen": "c", "rejected": "r", "margin": margin });
        parse(row, SEQUENCE).map(|(_, row)| row.margin).map_err(|fault| fault.to_string())
    };
    assert_eq!(with(json!(0.5)), Ok(Some(0.5)));
    assert_eq!(with(json!(-2)), Ok(Some(-2.0)));
    assert_eq!(with(json!(" 1.5 ")), Ok(Some(1.5)));
    assert_eq!(with(json!(null)), Ok(None));
    assert_eq!(with(json!("")), Ok(None));
    for (bad, found) in [
        (json!("NaN"), "\"NaN\""),
        (json!("inf"), "\"inf\""),
        (json!(1e300), "1e+300"),
        (json!([1]), "a list"),
    ] {
        assert_eq!(with(bad), Err(format!("`margin` is {found}, expected a finite number")));
    }
    // DPO has no margin, so the column is not read.
    let row = json!({ "chosen": "ab", "rejected": "ac", "margin": "x" });
    assert_eq!(parse(row, COMPLETION).unwrap().1.margin, None);
}

#[test]
fn token_ids_are_for_reward_models() {
    let row = json!({ "chosen_ids": [1, 2], "rejected_ids": [3], "chosen": 5 });
    let (format, row) = parse(row, SEQUENCE).unwrap();
    assert_eq!(format, Format::TokenPreference);
    assert_eq!(row.sides, PreferenceSides::Tokens { chosen: vec![1, 2], rejected: vec![3] });
    let row = json!({ "chosen_ids": [1], "rejected_ids": [3] });
    let wrong = parse(row, COMPLETION).unwrap_err();
    assert!(matches!(wrong, RowFault::WrongTask { .. }), "{wrong}");
    let missing = parse(json!({ "chosen_ids": [1] }), SEQUENCE).unwrap_err();
    assert!(matches!(missing, RowFault::MissingColumn { missing: "rejected_ids", .. }), "{missing}");
}

proptest! {
    #[test]
    fn splitting_off_the_prompt_loses_nothing(common in ".{0,8}", a in ".{0,8}", b in ".{0,8}") {
        let (chosen, rejected) = (common.clone() + &a, common + &b);
        let row = json!({ "chosen": chosen, "rejected": rejected });
        let [prompt, c, r] = text(row, COMPLETION);
        prop_assert_eq!(prompt.clone() + &c, chosen.clone());
        prop_assert_eq!(prompt + &r, rejected.clone());
        prop_assert!(chosen.is_empty() || rejected.is_empty() || (!c.is_empty() && !r.is_empty()));
    }

    #[test]
    fn any_values_parse_without_a_panic(
        values in prop::collection::vec(0usize..8, 5), completion in any::<bool>(),
    ) {
        let values: Vec<Option<Value>> = values.into_iter().map(|choice| match choice {
            0 => None,
            1 => Some(json!(null)),
            2 => Some(json!([])),
            3 => Some(json!([{}])),
            4 => Some(json!([message("user", "x"), message("assistant", "y")])),
            5 => Some(json!({ "role": 1 })),
            6 => Some(json!([1, -1, 1.5])),
            _ => Some(json!("text")),
        }).collect();
        let names = ["prompt", "chosen", "rejected", "margin", "chosen_ids"];
        let row = names.iter().zip(values).filter_map(|(name, value)| Some((name.to_string(), value?)));
        let _ = super::parse(&mut row.collect(), if completion { COMPLETION } else { SEQUENCE });
    }
}

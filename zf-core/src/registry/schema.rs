//! What a JSON schema says about settings: keys, types, defaults, help.

use schemars::Schema;
use serde_json::Value as Json;

/// One key of a stage's settings.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Setting {
    /// Its name.
    pub key: String,
    /// What it holds, in words: `number`, `text`, `one of "a", "b"`.
    pub holds: String,
    /// Whether it must be given.
    pub required: bool,
    /// What it is when it is not given, as TOML; `None` where it is required or has no value then.
    pub default: Option<String>,
    /// What it does.
    pub help: String,
}

/// The keys of a schema, in the schema's order (by name).
pub fn settings(schema: &Schema) -> Vec<Setting> {
    let root = schema.as_value();
    let required = root.get("required").and_then(Json::as_array);
    let properties = root.get("properties").and_then(Json::as_object);
    let entries = properties.into_iter().flatten();
    entries
        .map(|(key, property)| Setting {
            key: key.clone(),
            holds: holds(root, property),
            required: required.is_some_and(|names| names.iter().any(|name| name == key)),
            default: property.get("default").and_then(to_toml).map(|value| value.to_string()),
            help: description(root, property),
        })
        .collect()
}

/// The help of the setting at the end of `path`; empty where the schema has none.
pub fn help(schema: &Schema, path: &[&str]) -> String {
    let root = schema.as_value();
    let mut node = root;
    for key in path {
        match property(root, node, key) {
            Some(next) => node = next,
            None => return String::new(),
        }
    }
    description(root, node)
}

/// Whether the key holds the path of a file or folder: called `path`, or with `"format": "path"` in its schema
/// (`#[schemars(extend("format" = "path"))]`).
pub fn is_path(schema: Option<&Schema>, key: &str) -> bool {
    let marked = |node: &Json| node.get("format").is_some_and(|format| format == "path");
    key == "path"
        || schema.is_some_and(|schema| {
            let root = schema.as_value();
            property(root, root, key)
                .is_some_and(|node| marked(node) || alternatives(root, node).iter().any(|node| marked(node)))
        })
}

/// Sets of keys of which one replaces the others when a later layer of the run file gives it:
/// `#[schemars(extend("x-exclusive" = [["stage", "scope"]]))]` on the settings.
pub(crate) fn exclusive(schema: &Schema) -> Vec<Vec<String>> {
    let sets = schema.as_value().get("x-exclusive").cloned().unwrap_or_default();
    serde_json::from_value(sets).unwrap_or_default()
}

/// Puts the schema's defaults into `table` for the keys that are not there, also in tables within it.
pub(crate) fn fill(table: &mut toml::Table, schema: &Schema) {
    fill_node(table, schema.as_value(), schema.as_value());
}

fn fill_node(table: &mut toml::Table, root: &Json, node: &Json) {
    let properties = node.get("properties").and_then(Json::as_object);
    for (key, property) in properties.into_iter().flatten() {
        match table.get_mut(key) {
            None => {
                if let Some(value) = property.get("default").and_then(to_toml) {
                    table.insert(key.clone(), value);
                }
            }
            Some(toml::Value::Table(inner)) => fill_node(inner, root, target(root, property)),
            Some(_) => {}
        }
    }
}

/// A JSON value as TOML, without nulls; `None` for null itself.
fn to_toml(json: &Json) -> Option<toml::Value> {
    Some(match json {
        Json::Null => return None,
        Json::Bool(value) => toml::Value::Boolean(*value),
        Json::Number(number) => match number.as_i64() {
            Some(whole) => toml::Value::Integer(whole),
            None => toml::Value::Float(number.as_f64()?),
        },
        Json::String(text) => toml::Value::String(text.clone()),
        Json::Array(items) => toml::Value::Array(items.iter().filter_map(to_toml).collect()),
        Json::Object(entries) => {
            toml::Value::Table(entries.iter().filter_map(|(key, value)| Some((key.clone(), to_toml(value)?))).collect())
        }
    })
}

/// The node itself or the definition that it refers to.
fn target<'a>(root: &'a Json, node: &'a Json) -> &'a Json {
    let reference = node.get("$ref").and_then(Json::as_str);
    reference
        .and_then(|reference| reference.strip_prefix('#'))
        .and_then(|pointer| root.pointer(pointer))
        .unwrap_or(node)
}

fn alternatives<'a>(root: &'a Json, node: &'a Json) -> Vec<&'a Json> {
    ["anyOf", "oneOf", "allOf"]
        .iter()
        .filter_map(|keyword| node.get(*keyword).and_then(Json::as_array))
        .flatten()
        .map(|node| target(root, node))
        .collect()
}

fn property<'a>(root: &'a Json, node: &'a Json, key: &str) -> Option<&'a Json> {
    let node = target(root, node);
    let own = node.get("properties").and_then(|all| all.get(key));
    own.or_else(|| alternatives(root, node).into_iter().find_map(|node| property(root, node, key)))
}

fn description(root: &Json, node: &Json) -> String {
    let own = node.get("description").and_then(Json::as_str);
    let text = own.or_else(|| target(root, node).get("description")?.as_str());
    text.unwrap_or("").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn holds(root: &Json, node: &Json) -> String {
    let node = target(root, node);
    if let Some(names) = node.get("enum").and_then(Json::as_array) {
        let names: Vec<String> = names.iter().filter(|name| !name.is_null()).map(Json::to_string).collect();
        return format!("one of {}", names.join(", "));
    }
    if let Some(name) = node.get("const") {
        return name.to_string();
    }
    let mut words: Vec<String> = match node.get("type") {
        Some(Json::String(kind)) => vec![kind.clone()],
        Some(Json::Array(kinds)) => kinds.iter().filter_map(|kind| kind.as_str().map(str::to_owned)).collect(),
        _ => alternatives(root, node).into_iter().map(|node| holds(root, node)).collect(),
    };
    for word in &mut words {
        *word = match word.as_str() {
            "integer" => "whole number".to_owned(),
            "string" => "text".to_owned(),
            "boolean" => "true or false".to_owned(),
            "object" => "table".to_owned(),
            "array" => {
                node.get("items").map_or_else(|| "list".to_owned(), |items| format!("list of {}", holds(root, items)))
            }
            _ => continue,
        };
    }
    words.retain(|word| word != "null");
    words.dedup();
    let literals = words.iter().all(|word| word.starts_with('"'));
    match words.len() {
        0 => "anything".to_owned(),
        1 => words.remove(0),
        _ if literals => format!("one of {}", words.join(", ")),
        _ => words.join(" or "),
    }
}

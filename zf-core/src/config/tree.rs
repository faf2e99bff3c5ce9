//! A run file as a tree of values that know where they come from, and how layers are laid over each other.

use std::ops::Range;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::source::Mark;
use crate::registry::Step;

/// How deep tables and arrays may be nested: walking them must not exhaust the stack.
pub(super) const MAX_DEPTH: usize = 64;

/// A value with its place.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// The key's place (for an array's element, the element's).
    pub(super) key: Mark,
    /// The value's place.
    pub(super) value: Mark,
    /// What it holds.
    pub(super) body: Body,
}

/// What a [`Node`] holds.
#[derive(Debug, Clone)]
pub(super) enum Body {
    /// Neither array nor table.
    Leaf(toml::Value),
    /// In order.
    Array(Vec<Node>),
    /// In the order of the file.
    Table(Tree),
}

/// A table of nodes, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree(pub(super) Vec<(String, Node)>);

/// A text that is no TOML.
pub(super) struct ParseError {
    /// Where.
    pub(super) span: Range<usize>,
    /// What is wrong.
    pub(super) message: String,
}

impl From<toml::de::Error> for ParseError {
    fn from(error: toml::de::Error) -> Self {
        Self { span: error.span().unwrap_or(0..0), message: error.message().trim().replace('\n', ", ") }
    }
}

impl Node {
    /// A leaf that was not parsed from TOML.
    pub(super) fn leaf(value: toml::Value, mark: Mark) -> Self {
        Self { key: mark.clone(), value: mark, body: Body::Leaf(value) }
    }

    /// The plain value.
    pub(super) fn plain(&self) -> toml::Value {
        match &self.body {
            Body::Leaf(value) => value.clone(),
            Body::Array(items) => toml::Value::Array(items.iter().map(Self::plain).collect()),
            Body::Table(tree) => toml::Value::Table(tree.plain()),
        }
    }

    /// The table, if it is one.
    pub(super) fn table(&self) -> Option<&Tree> {
        match &self.body {
            Body::Table(tree) => Some(tree),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.body {
            Body::Leaf(toml::Value::String(text)) => Some(text),
            _ => None,
        }
    }

    fn of(key: Mark, value: Spanned<DeValue<'_>>, depth: usize) -> Result<Self, ParseError> {
        let source = key.source;
        if depth == MAX_DEPTH {
            return Err(ParseError { span: value.span(), message: format!("nested more than {MAX_DEPTH} deep") });
        }
        let mark = Mark { source, span: value.span() };
        let body = match value.get_ref() {
            DeValue::Table(_) => match value.into_inner() {
                DeValue::Table(table) => Body::Table(Tree::of(source, table, depth + 1)?),
                _ => return Err(changed(mark.span)),
            },
            DeValue::Array(_) => match value.into_inner() {
                DeValue::Array(items) => {
                    let nodes = items.into_iter().map(|item| {
                        let place = Mark { source, span: item.span() };
                        Self::of(place, item, depth + 1)
                    });
                    Body::Array(nodes.collect::<Result<_, _>>()?)
                }
                _ => return Err(changed(mark.span)),
            },
            _ => {
                let span = value.span();
                let leaf = toml::Value::deserialize(value.into_deserializer());
                Body::Leaf(leaf.map_err(|error| ParseError { span, message: error.message().trim().to_owned() })?)
            }
        };
        Ok(Self { key, value: mark, body })
    }
}

fn changed(span: Range<usize>) -> ParseError {
    ParseError { span, message: "not a value".to_owned() }
}

impl Tree {
    /// Reads a document; spans point into source number `source`, whose text `text` is.
    pub(super) fn parse(source: usize, text: &str) -> Result<Self, ParseError> {
        Self::of(source, DeTable::parse(text)?.into_inner(), 0)
    }

    fn of(source: usize, table: DeTable<'_>, depth: usize) -> Result<Self, ParseError> {
        let mut entries: Vec<(String, Node)> = Vec::with_capacity(table.len());
        for (key, value) in table {
            let mark = Mark { source, span: key.span() };
            entries.push((key.into_inner().into_owned(), Node::of(mark, value, depth)?));
        }
        // toml may sort keys; the file's order is that of the places.
        entries.sort_by_key(|(_, node)| node.key.span.start);
        Ok(Self(entries))
    }

    /// The entry `key`.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, node)| node)
    }

    /// Removes and returns the entry `key`.
    pub(super) fn remove(&mut self, key: &str) -> Option<Node> {
        let at = self.0.iter().position(|(k, _)| k == key)?;
        Some(self.0.remove(at).1)
    }

    /// The node at the end of `path`.
    pub(super) fn find(&self, path: &[Step]) -> Option<&Node> {
        let (first, rest) = path.split_first()?;
        let Step::Key(key) = first else { return None };
        let mut node = self.get(key)?;
        for step in rest {
            node = match (step, &node.body) {
                (Step::Key(key), Body::Table(tree)) => tree.get(key)?,
                (Step::Index(index), Body::Array(items)) => items.get(*index)?,
                _ => return None,
            };
        }
        Some(node)
    }

    /// The plain table.
    pub(super) fn plain(&self) -> toml::Table {
        let entries = self.0.iter();
        entries.map(|(key, node)| (key.clone(), node.plain())).collect()
    }

    /// Lays `over` over this tree: tables are joined, everything else is replaced.
    pub(super) fn lay(&mut self, over: Tree) {
        for (key, node) in over.0 {
            match self.0.iter_mut().find(|(k, _)| *k == key) {
                None => self.0.push((key, node)),
                Some((_, old)) => match (&mut old.body, node.body) {
                    (Body::Table(below), Body::Table(above)) => {
                        below.lay(above);
                        // The section's head of the later layer is the one that errors point at.
                        old.key = node.key;
                        old.value = node.value;
                    }
                    (_, body) => *old = Node { body, ..node },
                },
            }
        }
    }

    /// Calls `f` on every leaf with its path.
    pub(super) fn each_leaf(&mut self, f: &mut dyn FnMut(&[Step], &mut Node)) {
        let mut path = Vec::new();
        self.walk(&mut path, f);
    }

    fn walk(&mut self, path: &mut Vec<Step>, f: &mut dyn FnMut(&[Step], &mut Node)) {
        for (key, node) in &mut self.0 {
            path.push(Step::Key(key.clone()));
            walk_node(node, path, f);
            path.pop();
        }
    }
}

fn walk_node(node: &mut Node, path: &mut Vec<Step>, f: &mut dyn FnMut(&[Step], &mut Node)) {
    match &mut node.body {
        Body::Leaf(_) => f(path, node),
        Body::Table(tree) => tree.walk(path, f),
        Body::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                path.push(Step::Index(index));
                walk_node(item, path, f);
                path.pop();
            }
        }
    }
}

//! Reading layers and laying them over each other: preset, `extends` files, file, overrides.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::rules::EXCLUSIVE;
use super::source::{Kind, Mark, Source};
use super::tree::{Body, MAX_DEPTH, Node, ParseError, Tree};
use crate::registry::{Registry, SlotInfo, Step, schema};
use crate::{Error, Result, slots};

/// How many files may extend each other.
const MAX_FILES: usize = 16;

/// How large a run file may be.
const MAX_BYTES: u64 = 4 << 20;

/// All layers laid over each other.
pub(super) struct Layers {
    /// The texts that places point into.
    pub(super) sources: Vec<Source>,
    /// The result.
    pub(super) root: Tree,
    /// The preset that was chosen.
    pub(super) preset: Option<String>,
    /// Where it was chosen.
    pub(super) preset_mark: Option<Mark>,
}

/// Reads layers, from the lowest to the highest.
#[derive(Debug, Clone)]
pub(super) struct Loader<'a> {
    registry: &'a Registry,
    sources: Vec<Source>,
    layers: Vec<Tree>,
    /// Whether files may hold a `[sweep]`, which is then no part of their layers.
    sweeps: bool,
    sweep: Option<Node>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(registry: &'a Registry) -> Self {
        Self { registry, sources: Vec::new(), layers: Vec::new(), sweeps: false, sweep: None }
    }

    /// The same for a sweep.
    pub(super) fn of_sweep(self) -> Self {
        Self { sweeps: true, ..self }
    }

    /// The `[sweep]` of the file, or else of the nearest one that it extends.
    pub(super) fn take_sweep(&mut self) -> Option<Node> {
        self.sweep.take()
    }

    /// What knows the stages.
    pub(super) fn registry(&self) -> &'a Registry {
        self.registry
    }

    /// Adds a layer whose places lie in the texts that were read.
    pub(super) fn layer(&mut self, layer: Tree) {
        self.layers.push(layer);
    }

    /// Adds a file, after the files that it extends.
    pub(super) fn file(&mut self, path: &Path) -> Result<()> {
        self.extended(path, &mut Vec::new(), None)
    }

    /// Adds a text, which cannot extend a file by a relative path unless it has a folder.
    pub(super) fn text(&mut self, text: &str, label: &str) -> Result<()> {
        let tree =
            self.parse(Source { kind: Kind::File, label: label.to_owned(), text: text.to_owned(), dir: None })?;
        if let Some(node) = tree.get("extends") {
            return Err(self.fail(&node.key, "`extends` needs a file, this is a text", ""));
        }
        self.layers.push(tree);
        Ok(())
    }

    /// Adds `key.path=value`.
    pub(super) fn overriding(&mut self, text: &str) -> Result<()> {
        let Some((key, value)) = text.split_once('=') else {
            return Err(Error::Config(format!("-o {text}: expected key=value, for example -o run.steps=100")));
        };
        let keys: Vec<&str> = key.split('.').map(str::trim).collect();
        if keys.iter().any(|key| key.is_empty()) {
            return Err(Error::Config(format!(
                "-o {text}: expected a key such as run.steps before `=`, found `{key}`"
            )));
        }
        if keys.len() > MAX_DEPTH {
            return Err(Error::Config(format!("-o {text}: the key is nested more than {MAX_DEPTH} deep")));
        }
        if keys == ["extends"] {
            return Err(Error::Config(format!("-o {text}: `extends` can be set in a file only")));
        }
        let source = self.sources.len();
        let mark = Mark { source, span: 0..text.len() };
        self.sources.push(Source {
            kind: Kind::Override,
            label: text.to_owned(),
            text: text.to_owned(),
            dir: Some(PathBuf::new()),
        });
        // What is no TOML value is a text: shells take the quotes away.
        let value = value.trim();
        let parsed = value.parse::<toml::Value>();
        let parsed = parsed.unwrap_or_else(|_| toml::Value::String(value.to_owned()));
        let mut node = graft(parsed, &mark);
        for key in keys[1..].iter().rev() {
            node = Node {
                body: Body::Table(Tree(vec![((*key).to_owned(), node)])),
                key: mark.clone(),
                value: mark.clone(),
            };
        }
        self.layers.push(Tree(vec![(keys[0].to_owned(), node)]));
        Ok(())
    }

    /// Lays all layers over each other, the preset that they name below them.
    pub(super) fn finish(mut self) -> Result<Layers> {
        let chosen = self.layers.iter().rev().find_map(|tree| tree.get("preset"));
        let (mut preset, mut preset_mark) = (None, None);
        if let Some(node) = chosen.cloned() {
            let name = node.text().ok_or_else(|| self.fail(&node.value, "`preset`: expected a text", ""))?;
            let tree = self.preset(name, &node.value)?;
            self.layers.insert(0, tree);
            preset = Some(name.to_owned());
            preset_mark = Some(node.value);
        }
        let slots = self.registry.slots();
        let mut root = Tree::default();
        for layer in std::mem::take(&mut self.layers) {
            drop_replaced(&mut root, &layer, &slots, &self.sources, self.registry);
            root.lay(layer);
        }
        root.remove("preset");
        let Self { sources, registry, .. } = self;
        anchor_paths(&mut root, &sources, &slots, registry);
        Ok(Layers { sources, root, preset, preset_mark })
    }

    fn extended(&mut self, path: &Path, chain: &mut Vec<PathBuf>, from: Option<&Mark>) -> Result<()> {
        let blame = |loader: &Self, message: String| match from {
            Some(mark) => loader.fail(mark, &message, ""),
            None => Error::Config(message),
        };
        let bytes =
            read_limited(path).map_err(|error| blame(self, format!("{}: cannot be read: {error}", path.display())))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            blame(self, format!("{}: not UTF-8 at byte {at}", path.display()))
        })?;
        let identity = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if chain.contains(&identity) {
            let message = format!("{} extends itself", path.display());
            return Err(blame(self, message));
        }
        if chain.len() == MAX_FILES {
            let message = format!("more than {MAX_FILES} files extend each other");
            return Err(blame(self, message));
        }
        chain.push(identity);
        let dir = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut tree =
            self.parse(Source { kind: Kind::File, label: path.display().to_string(), text, dir: Some(dir.clone()) })?;
        if self.sweeps {
            let own = tree.remove("sweep");
            self.sweep = self.sweep.take().or(own);
        }
        if let Some(node) = tree.remove("extends") {
            let Some(below) = node.text() else {
                let message = "`extends`: expected the path of one file";
                return Err(self.fail(&node.value, message, ""));
            };
            self.extended(&dir.join(below), chain, Some(&node.value))?;
        }
        self.layers.push(tree);
        Ok(())
    }

    fn preset(&mut self, name: &str, mark: &Mark) -> Result<Tree> {
        let slot = SlotInfo::of::<slots::Preset>().name;
        let Some(entry) = self.registry.find(slot, name) else {
            let message = format!("unknown preset `{name}`");
            return Err(self.fail(mark, &message, &self.registry.unknown_name(slot, name)));
        };
        let tree = self.parse(Source {
            kind: Kind::Preset,
            label: name.to_owned(),
            text: entry.example.to_owned(),
            dir: None,
        })?;
        let forbidden = ["preset", "extends"].iter().find_map(|key| tree.get(key));
        match forbidden {
            Some(node) => Err(self.fail(&node.key, "a preset cannot build on another", "")),
            None => Ok(tree),
        }
    }

    fn parse(&mut self, source: Source) -> Result<Tree> {
        let parsed = Tree::parse(self.sources.len(), &source.text);
        let result = parsed.map_err(|ParseError { span, message }| Error::Config(source.render(&span, &message, "")));
        self.sources.push(source);
        result
    }

    /// An error at a place of the texts that were read.
    pub(super) fn fail(&self, mark: &Mark, message: &str, advice: &str) -> Error {
        Error::Config(self.sources[mark.source].render(&mark.span, message, advice))
    }
}

/// The bytes of a file of at most [`MAX_BYTES`], so that a model given by mistake is not read into memory.
fn read_limited(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        let message = format!("larger than {} MiB, which is no run file", MAX_BYTES >> 20);
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// An override's value as nodes that all carry the override's mark.
fn graft(value: toml::Value, mark: &Mark) -> Node {
    let body = match value {
        toml::Value::Table(table) => {
            Body::Table(Tree(table.into_iter().map(|(key, value)| (key, graft(value, mark))).collect()))
        }
        toml::Value::Array(items) => Body::Array(items.into_iter().map(|value| graft(value, mark)).collect()),
        leaf => return Node::leaf(leaf, mark.clone()),
    };
    Node { key: mark.clone(), value: mark.clone(), body }
}

/// Takes out of `root` what `layer` makes meaningless: the settings of a section whose stage it replaces by another one,
/// what a preset said in sections that serve the replaced stage, and the other keys of an exclusive set.
fn drop_replaced(root: &mut Tree, layer: &Tree, slots: &[SlotInfo], sources: &[Source], registry: &Registry) {
    for slot in slots {
        let name = |tree: &Tree| {
            let section = tree.get(slot.name)?.table()?;
            section.get(slot.key).map(Node::plain)
        };
        let Some(new) = name(layer) else { continue };
        let default = slot.default.map(|name| toml::Value::String(name.to_owned()));
        if name(root).or(default) != Some(new) {
            root.remove(slot.name);
            for served in slots.iter().filter(|other| other.serves == Some(slot.name)) {
                drop_preset(root, served.name, sources);
            }
        }
    }
    for (section, keys) in EXCLUSIVE {
        drop_exclusive(root, layer, section, keys);
    }
    for slot in slots {
        let section = |tree: &Tree| tree.get(slot.name).and_then(Node::table)?.get(slot.key)?.text().map(str::to_owned);
        let name = section(layer).or_else(|| section(root)).or_else(|| slot.default.map(str::to_owned));
        let Some(entry) = name.and_then(|name| registry.find(slot.name, &name)) else { continue };
        for keys in schema::exclusive(&entry.schema()) {
            drop_exclusive(root, layer, slot.name, &keys);
        }
    }
}

/// Takes out of a section what a preset alone said there.
fn drop_preset(root: &mut Tree, section: &str, sources: &[Source]) {
    fn strip(node: &mut Node, sources: &[Source]) -> bool {
        match &mut node.body {
            Body::Table(tree) => {
                tree.0.retain_mut(|(_, node)| strip(node, sources));
                !tree.0.is_empty() || sources[node.value.source].kind != Kind::Preset
            }
            _ => sources[node.value.source].kind != Kind::Preset,
        }
    }
    root.0.retain_mut(|(key, node)| key != section || strip(node, sources));
}

/// Takes `keys` out of a section of `root` where `layer` gives one of them.
fn drop_exclusive(root: &mut Tree, layer: &Tree, section: &str, keys: &[impl AsRef<str>]) {
    let Some(above) = layer.get(section).and_then(Node::table) else { return };
    let Some((_, node)) = root.0.iter_mut().find(|(key, _)| key == section) else { return };
    if let Body::Table(below) = &mut node.body
        && keys.iter().any(|key| above.get(key.as_ref()).is_some())
    {
        below.0.retain(|(key, _)| !keys.iter().any(|other| other.as_ref() == key));
    }
}

/// Makes relative paths in stages' settings absolute, each from the folder of the file that holds it; those of overrides
/// from the current folder.
fn anchor_paths(root: &mut Tree, sources: &[Source], slots: &[SlotInfo], registry: &Registry) {
    for slot in slots {
        let Some((_, node)) = root.0.iter_mut().find(|(key, _)| key == slot.name) else {
            continue;
        };
        let Body::Table(section) = &mut node.body else {
            continue;
        };
        let name = section.get(slot.key).and_then(Node::text).or(slot.default);
        let entry = name.and_then(|name| registry.find(slot.name, name));
        let schema = entry.map(|entry| entry.schema());
        section.each_leaf(&mut |path, leaf| {
            let Some(Step::Key(key)) = path.last() else {
                return;
            };
            let schema = schema.as_ref().filter(|_| path.len() == 1);
            if let Some(text) = leaf.text()
                && schema::is_path(schema, key)
                && let Some(path) = anchored(text, &sources[leaf.value.source])
            {
                leaf.body = Body::Leaf(toml::Value::String(path));
            }
        });
    }
}

/// `text` as an absolute path; `None` when it stays as it is.
fn anchored(text: &str, source: &Source) -> Option<String> {
    let joined = source.dir.as_ref()?.join(text);
    let path = std::path::absolute(&joined).ok()?;
    // `organisation/name` may be a Hub identifier; the model says what to do about it, if it is left as it is.
    let hub = text.split('/').count() == 2 && !text.contains('.') && !path.exists();
    (!hub && !text.is_empty()).then(|| path.to_str().map(str::to_owned))?
}

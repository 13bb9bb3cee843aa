//! The table of all tokens' bytes, built from a `tokenizer.json`.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::Error;
use crate::pipeline::{LeadingStrip, Pipeline};

const LARGEST_ID: u32 = (1 << 24) - 1;

/// The vocabulary of one tokenizer, decoded. Immutable; share it in an `Arc`.
pub struct Decoder {
    /// Bytes of all tokens, one after another.
    bytes: Vec<u8>,
    /// Each token as it is after another one.
    entries: Vec<Entry>,
    /// Each token as it is at the start of a text; `None` if the decoder makes no difference.
    first_entries: Option<Vec<Entry>>,
    leading: Option<LeadingStrip>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Unknown,
    Ordinary,
    Special,
}

#[derive(Clone, Copy)]
struct Entry {
    start: u32,
    len: u32,
    kind: Kind,
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    decoder: Option<Map<String, Value>>,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocabulary,
}

struct Vocabulary(Vec<(String, u32)>);

struct VocabularyVisitor;

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = Vocabulary;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a map from token to id or a list of [token, score]")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
        let mut tokens = Vec::new();
        while let Some(entry) = map.next_entry()? {
            tokens.push(entry);
        }
        Ok(Vocabulary(tokens))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocabulary, A::Error> {
        let mut tokens = Vec::new();
        while let Some((token, _score)) = list.next_element::<(String, IgnoredAny)>()? {
            let id = tokens.len() as u32;
            tokens.push((token, id));
        }
        Ok(Vocabulary(tokens))
    }
}

/// One token of the file, before it is decoded.
#[derive(Clone, Copy)]
struct Source<'a> {
    text: &'a str,
    added: bool,
    special: bool,
}

impl Decoder {
    /// Builds the decoder from the contents of a `tokenizer.json`.
    ///
    /// Reads `model.vocab`, `added_tokens` and `decoder`; everything else is ignored. An added token
    /// whose text is in the model's vocabulary has the id it has there, any other its declared id.
    ///
    /// # Errors
    ///
    /// [`Error`] names the decoder or model kind that is not supported, or what cannot be read.
    pub fn from_tokenizer_json(json: &str) -> Result<Self, Error> {
        let file: TokenizerFile = serde_json::from_str(json)?;
        if let Some(kind) = file.model.kind
            && !["BPE", "Unigram", "WordPiece", "WordLevel"].contains(&kind.as_str())
        {
            return Err(Error::UnknownModel { kind });
        }
        let pipeline = Pipeline::new(file.decoder)?;
        let sources = sources(&file.model.vocab.0, &file.added_tokens)?;
        let mut bytes = Vec::new();
        let entries = table(&sources, &pipeline, false, &mut bytes)?;
        let first_entries = if pipeline.treats_first_differently() {
            Some(table(&sources, &pipeline, true, &mut bytes)?)
        } else {
            None
        };
        bytes.shrink_to_fit();
        Ok(Self { bytes, entries, first_entries, leading: pipeline.leading() })
    }

    /// One more than the largest id that has a token.
    pub fn vocab_size(&self) -> usize {
        self.entries.len()
    }

    /// Bytes that a token adds to a text that it does not begin; empty for an unknown id. They may
    /// be a part of a character.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.entries.get(id as usize).map_or(&[], |entry| self.slice(*entry))
    }

    /// Whether `skip_special_tokens` leaves the token out. False for an unknown id.
    pub fn is_special(&self, id: u32) -> bool {
        self.entries.get(id as usize).is_some_and(|entry| entry.kind == Kind::Special)
    }

    /// Bytes of a token at the start of a text or after another token; `None` for an unknown id and
    /// for a special token that is to be skipped.
    pub(crate) fn visible(&self, id: u32, first: bool, skip_special: bool) -> Option<&[u8]> {
        let entries = match &self.first_entries {
            Some(first_entries) if first => first_entries,
            _ => &self.entries,
        };
        let entry = entries.get(id as usize)?;
        let hidden = match entry.kind {
            Kind::Unknown => true,
            Kind::Special => skip_special,
            Kind::Ordinary => false,
        };
        (!hidden).then(|| self.slice(*entry))
    }

    pub(crate) fn leading(&self) -> Option<LeadingStrip> {
        self.leading
    }

    fn slice(&self, entry: Entry) -> &[u8] {
        let start = entry.start as usize;
        self.bytes.get(start..start + entry.len as usize).unwrap_or_default()
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Decoder")
            .field("vocab_size", &self.vocab_size())
            .field("leading", &self.leading)
            .finish_non_exhaustive()
    }
}

/// Tokens of the file by id. Whether a token is special depends on its text, as in `tokenizers`.
fn sources<'a>(
    vocabulary: &'a [(String, u32)],
    added: &'a [AddedToken],
) -> Result<Vec<Option<Source<'a>>>, Error> {
    let texts: HashSet<&str> = added.iter().map(|token| token.content.as_str()).collect();
    let special: HashSet<&str> =
        added.iter().filter(|token| token.special).map(|token| token.content.as_str()).collect();
    let mut ids_in_model: HashMap<&str, u32> = HashMap::new();
    let mut sources = Vec::new();
    let mut put = |id: u32, text: &'a str, added: bool| {
        if id > LARGEST_ID {
            let token = text.to_owned();
            return Err(Error::TokenIdTooLarge { token, id, limit: LARGEST_ID });
        }
        let index = id as usize;
        if sources.len() <= index {
            sources.resize(index + 1, None);
        }
        sources[index] = Some(Source { text, added, special: special.contains(text) });
        Ok(())
    };
    for (text, id) in vocabulary {
        if texts.contains(text.as_str()) {
            ids_in_model.insert(text, *id);
        }
        put(*id, text, false)?;
    }
    for token in added.iter().filter(|token| !token.content.is_empty()) {
        let id = ids_in_model.get(token.content.as_str()).copied().unwrap_or(token.id);
        put(id, &token.content, true)?;
    }
    Ok(sources)
}

/// Decodes every token and appends its text to `bytes`.
fn table(
    sources: &[Option<Source<'_>>],
    pipeline: &Pipeline,
    first: bool,
    bytes: &mut Vec<u8>,
) -> Result<Vec<Entry>, Error> {
    let limit = u32::MAX as usize;
    let mut entries = Vec::with_capacity(sources.len());
    for source in sources {
        let Some(source) = source else {
            entries.push(Entry { start: 0, len: 0, kind: Kind::Unknown });
            continue;
        };
        let text = pipeline.decode(source.text, first, source.added);
        let start = bytes.len();
        bytes.extend_from_slice(&text);
        if bytes.len() > limit {
            return Err(Error::VocabularyTooLarge { bytes: bytes.len(), limit });
        }
        let kind = if source.special { Kind::Special } else { Kind::Ordinary };
        entries.push(Entry { start: start as u32, len: text.len() as u32, kind });
    }
    Ok(entries)
}

// Markdown of an answer as elements. Text becomes text nodes alone, so nothing that a model says is ever markup.

const element = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

// `code`, **strong**, *emphasis*, and addresses in angle brackets or plain, which open elsewhere and tell nobody from where.
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|(https?:\/\/[^\s<>"'`)\]]+)/g;

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(end, found.index));
    const [whole, code, strong, emphasis, address] = found;
    if (code) parts.push(element("code", code));
    else if (strong) parts.push(element("strong", strong));
    else if (emphasis) parts.push(element("em", emphasis));
    else {
      const link = element("a", address);
      link.href = address;
      link.rel = "noreferrer noopener";
      link.target = "_blank";
      parts.push(link);
    }
    end = found.index + whole.length;
  }
  return [...parts, text.slice(end)];
}

const HEADING = /^(#{1,6})\s+(.*)$/, ITEM = /^\s*([-*+]|\d{1,9}[.)])\s+(.*)$/, FENCE = /^\s*```/;

// The blocks of a text: code between fences, headings, lists, quotes, and paragraphs. Headings begin below the page's
// own, and none skips a level, whatever the text does.
export function markdown(text) {
  const blocks = [], lines = text.split("\n");
  let i = 0, level = 1;
  while (i < lines.length) {
    if (FENCE.test(lines[i])) {
      const code = [];
      for (i += 1; i < lines.length && !FENCE.test(lines[i]); i += 1) code.push(lines[i]);
      i += 1;
      const block = element("pre", element("code", code.join("\n")));
      block.tabIndex = 0;  // it may scroll sideways
      blocks.push(block);
    } else if (HEADING.test(lines[i])) {
      const [, marks, title] = lines[i].match(HEADING);
      level = Math.min(6, marks.length + 1, level + 1);
      blocks.push(element(`h${level}`, ...inline(title)));
      i += 1;
    } else if (ITEM.test(lines[i])) {
      const ordered = /\d/.test(lines[i].match(ITEM)[1]), list = element(ordered ? "ol" : "ul");
      if (ordered) list.start = parseInt(lines[i].match(ITEM)[1], 10);
      for (; i < lines.length && ITEM.test(lines[i]); i += 1) list.append(element("li", ...inline(lines[i].match(ITEM)[2])));
      blocks.push(list);
    } else if (lines[i].startsWith(">")) {
      const said = [];
      for (; i < lines.length && lines[i].startsWith(">"); i += 1) said.push(lines[i].replace(/^>\s?/, ""));
      blocks.push(element("blockquote", ...inline(said.join("\n"))));
    } else if (!lines[i].trim()) {
      i += 1;
    } else {
      const said = [];
      const plain = (line) => line.trim() && !FENCE.test(line) && !HEADING.test(line) && !ITEM.test(line) && !line.startsWith(">");
      do said.push(lines[i++]); while (i < lines.length && plain(lines[i]));
      blocks.push(element("p", ...inline(said.join("\n"))));
    }
  }
  return blocks;
}

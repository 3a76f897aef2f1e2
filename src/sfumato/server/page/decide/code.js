// The call that the Decide view makes, as programs that a person can paste. Knows the body and the
// address, and no DOM. The key itself is never shown: programs read it from the environment.

import { PYTHON_WORDS, isReordered, json, pretty } from './literal.js';

const KEY = 'SFUMATO_API_KEY';

/** Languages, in the order of the buttons: name → (address, body, has a key) → program. */
export const LANGUAGES = { curl, Python: python, TypeScript: typescript };

function curl(url, body, hasKey) {
  const quoted = pretty(body).replaceAll("'", String.raw`'\''`);
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $${KEY}"` : '';
  return `curl ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

function python(url, body, hasKey) {
  const key = hasKey ? `headers = {"Authorization": f"Bearer {os.environ['${KEY}']}"}\n` : '';
  return `${hasKey ? 'import os\n\n' : ''}import httpx

body = ${pretty(body, { words: PYTHON_WORDS, indent: 4 })}
${key}response = httpx.post(
    ${JSON.stringify(url)}, json=body,${hasKey ? ' headers=headers,' : ''} timeout=60
)
response.raise_for_status()
for name, answer in response.json()["answers"].items():
    print(name, answer)
`;
}

function typescript(url, body, hasKey) {
  // An object literal would put options whose names are numbers first, in another order.
  const text = isReordered(body) ? JSON.stringify(json(body)) : `JSON.stringify(${pretty(body, { margin: 2 })})`;
  const key = hasKey ? `\n    Authorization: \`Bearer \${process.env.${KEY}}\`,` : '';
  return `const response = await fetch(${JSON.stringify(url)}, {
  method: "POST",
  headers: {
    "Content-Type": "application/json",${key}
  },
  body: ${text},
});
if (!response.ok) throw new Error(await response.text());
const { answers } = await response.json();
console.log(answers);
`;
}

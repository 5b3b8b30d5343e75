// What the common parameters do, for readers of a chat; the others have the text of the API's reference.

export const PARAM_TEXTS: Record<string, string> = {
  temperature:
    "How freely it chooses: 0 always takes the likeliest token, more is more varied and less sure.",
  top_p: "Only the likeliest tokens that together have this probability are considered.",
  top_k: "Only this number of the likeliest tokens is considered; 0: all.",
  min_p: "Tokens less likely than this share of the likeliest one are left out.",
  max_tokens: "The longest answer, in tokens; a token is about three quarters of an English word.",
  repetition_penalty: "Above 1, words of the chat become less likely to come again.",
  frequency_penalty: "Words become less likely each time that the answer uses them.",
  presence_penalty: "Words become less likely once the answer has used them.",
  seed: "The same seed and the same chat give the same answer. Empty: a new seed for each answer.",
  stop: "The answer ends where it would write one of these texts.",
};
